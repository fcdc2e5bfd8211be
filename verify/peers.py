"""T9: what the tolerances of other projects say of the same output. Reported, never judged by."""

from __future__ import annotations

import numpy as np

from .arithmetic import DTYPES
from .inputs import Inputs

# torch.testing.assert_close: (rtol, atol) by dtype.
TORCH = {"float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}


def peers(out: np.ndarray, want: np.ndarray, inputs: Inputs | None = None) -> dict[str, bool]:
    """Whether `out` (in its stored dtype) passes against `want` (float64), by the name of each habit.

    "FlashAttention 2x" (at most twice the error of a naive 16-bit implementation) needs the inputs.
    """
    got = out.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want)
        close = lambda rtol, atol: bool((error <= atol + rtol * np.abs(want)).all())
        verdicts = {
            "allclose 1e-2": close(1e-2, 1e-2),
            "FlashInfer 1e-3": close(1e-3, 1e-3),
            "CUTLASS 1e-2/1e-3": close(1e-2, 1e-3),
            "torch default": close(*TORCH[out.dtype.name]),
        }
        if inputs is not None and out.size:
            naive = np.abs(low_precision(inputs, out.dtype.name).astype(np.float64) - want)
            verdicts["FlashAttention 2x"] = bool(error.max() <= 2 * naive.max())
    return verdicts


@np.errstate(invalid="ignore", over="ignore")
def low_precision(inputs: Inputs, dtype: str) -> np.ndarray:
    """Naive attention whose scores, P and output are each stored in `dtype`, `[batch_size, num_q_heads, head_dim]`."""
    narrow = DTYPES[dtype]
    out = np.zeros(inputs.q.shape, narrow)
    for b in np.flatnonzero(inputs.context_lens).tolist():
        for kv_head in range(inputs.num_kv_heads):
            q, k, v = (x.astype(np.float32) for x in inputs.head(b, kv_head))
            s = (np.float32(inputs.sm_scale) * (q @ k.T)).astype(narrow).astype(np.float32)
            p = np.exp(s - s.max(1, keepdims=True))
            p = (p / p.sum(1, keepdims=True)).astype(narrow).astype(np.float32)
            out[b, kv_head * len(q) : (kv_head + 1) * len(q)] = (p @ v).astype(narrow)
    return out
