"""Right before fast: a sample of rows against float64 NumPy, and whole outputs against float64 on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .cases import DTYPES, BenchCase, PageSets, normal

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
# Allowed error in units of u sum p|v| / l, besides the output's own rounding. 16 bits: P and the partials may each be rounded
# once (1 + 1), twice that for scores of rounded products. float32: a score is a sum of head_dim products, ex2 is approximate.
CHECK_UNITS = {"float16": 4, "bfloat16": 4, "float32": 256}
OUTPUTS = 10**6
# Scores held at once, in float64: 1 GB.
SCORES = 1 << 27

# Enqueues a call on page set i and returns its output, [batch_size, num_q_heads, head_dim].
Call = Callable[[int], Any]


class NotFiniteError(ValueError):
    """An output that is NaN or infinite: of normal inputs, and where poison lies beside them, the sign of a stray read."""


def on_host(array: Any) -> np.ndarray:
    """The array in NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


def tokens(sets: PageSets, cache: Any, i: int, b: int) -> Any:
    """K or V of request b of set i, [context_len, num_kv_heads, head_dim]."""
    case = sets.case
    rows = cache[sets.page_tables[i, b, : case.pages[b]]]
    rows = rows if case.layout == "NHD" else rows.swapaxes(1, 2)
    return rows.reshape(-1, case.num_kv_heads, case.head_dim)[: case.context_lens[b]]


def attention(xp: ModuleType, q: Any, k: Any, v: Any, sm_scale: float) -> tuple[Any, Any]:
    """float64 attention of q [heads, rows, D] over k and v [heads, tokens, D]: the output, and sum p|v| / sum p."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out, size = xp.empty_like(q), xp.empty_like(q)
    step = max(1, SCORES // (k.shape[0] * k.shape[1]))
    for row in range(0, q.shape[1], step):
        scores = xp.matmul(q[:, row : row + step] * sm_scale, k.swapaxes(1, 2))
        p = xp.exp(scores - scores.max(-1, keepdims=True))
        l = p.sum(-1, keepdims=True)
        out[:, row : row + step] = xp.matmul(p, v) / l
        size[:, row : row + step] = xp.matmul(p, abs(v)) / l
    return out, size


def exact_outputs(sets: PageSets, q: Any, i: int = 0) -> np.ndarray:
    """Exact outputs of queries [n, batch_size, num_q_heads, head_dim] on set i, float64, same shape, on the host."""
    case, xp = sets.case, sets.xp
    exact = np.empty(q.shape)
    for b in range(case.batch_size):
        k, v = (tokens(sets, cache, i, b).swapaxes(0, 1) for cache in sets.pools)
        # [n, Hkv, G, D] -> [Hkv, n * G, D]: all queries of a KV head in one product.
        grouped = q[:, b].reshape(len(q), case.num_kv_heads, -1, case.head_dim).swapaxes(0, 1)
        out, _ = attention(xp, grouped.reshape(case.num_kv_heads, -1, case.head_dim), k, v, case.sm_scale)
        exact[:, b] = on_host(out.reshape(grouped.shape).swapaxes(0, 1).reshape(len(q), case.num_q_heads, case.head_dim))
    return exact


def exact_rows(sets: PageSets, q: Any, i: int, b: int, kv_head: int) -> tuple[np.ndarray, np.ndarray]:
    """NumPy's `attention` of queries [rows, D] of one KV head of request b of set i."""
    k, v = (on_host(tokens(sets, cache, i, b)[:, kv_head])[None] for cache in sets.pools)
    out, size = attention(np, on_host(q)[None], k, v, sets.case.sm_scale)
    return out[0], size[0]


def check(sets: PageSets, call: Call, rows: int = 3) -> None:
    """Compares rows of the first and the last set's output with NumPy; `sets.out` is NaN before.

    ValueError names the worst element.
    """
    case, u = sets.case, UNIT[sets.case.dtype]
    draw = np.random.default_rng(len(sets))
    group = case.num_q_heads // case.num_kv_heads
    sets.out[...] = float("nan")
    for i in (0, len(sets) - 1):
        out = on_host(call(i)).astype(np.float64)
        if not np.isfinite(out).all():
            bad = tuple(int(n) for n in np.argwhere(~np.isfinite(out))[0])
            raise NotFiniteError(f"{case.name}: set {i}: expected finite outputs, got {out[bad]} at {bad}")
        longest = int(np.argmax(case.context_lens))
        for b in (longest, *draw.integers(case.batch_size, size=rows - 1).tolist()):
            kv_head = int(draw.integers(case.num_kv_heads))
            heads = slice(kv_head * group, (kv_head + 1) * group)
            if (i, b, kv_head) not in sets.known:
                sets.known[i, b, kv_head] = exact_rows(sets, sets.q[i, b, heads], i, b, kv_head)
            want, size = sets.known[i, b, kv_head]
            excess = abs(out[b, heads] - want) / (u * (abs(want) + CHECK_UNITS[case.dtype] * size))
            worst = np.unravel_index(np.argmax(excess), excess.shape)
            if not excess[worst] <= 1:
                head, d = (int(n) for n in worst)
                raise ValueError(
                    f"{case.name}: set {i}: expected {want[worst]:.9g}, got {out[b, heads][worst]:.9g}"
                    f" at request {b}, head {heads.start + head}, column {d}"
                )


@dataclass(frozen=True, eq=False)
class Reference:
    """Fresh queries on set 0, 10^6 outputs or more, and their exact results."""

    q: Any  # [n, batch_size, num_q_heads, head_dim]
    exact: np.ndarray

    def measure(self, sets: PageSets, call: Call) -> tuple[float, float]:
        """exact_fraction and rho of a call's outputs, its queries in the place of set 0's meanwhile."""
        got, before = np.empty(self.exact.shape, DTYPES[sets.case.dtype]), sets.q[0].copy()
        for n, q in enumerate(self.q):
            sets.q[0][...] = q
            got[n] = on_host(call(0))
        sets.q[0][...] = before
        return score(got, self.exact)


def reference(sets: PageSets, seed: int, outputs: int | None = None) -> Reference:
    """The device's float64 results; where the check's NumPy ones say otherwise, ValueError."""
    case = sets.case
    count = -(-(outputs or OUTPUTS) // case.outputs)
    q = normal(sets.xp, (count, *sets.q.shape[1:]), DTYPES[case.dtype], seed % 2**32)
    exact = exact_outputs(sets, q)
    b, group = int(np.argmin(case.context_lens)), case.num_q_heads // case.num_kv_heads
    want, size = exact_rows(sets, q[-1, b, :group], 0, b, 0)
    if not (abs(exact[-1, b, :group] - want) <= 1e-12 * size).all():
        raise ValueError(f"{case.name}: float64 on the device and in NumPy differ by more than 1e-12")
    return Reference(q, exact)


def score(got: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """The share of outputs equal to the correctly rounded exact result, and the RMS error over that of correct rounding.

    NumPy rounds float64 to float16 in one step; to bfloat16 in two, which moves one result in 10^5 at most.
    """
    ideal = exact.astype(got.dtype)
    error, least = (np.sqrt(np.mean((x.astype(np.float64) - exact) ** 2)) for x in (got, ideal))
    return float(np.mean(got == ideal)), float(error / least)


def describe(case: BenchCase) -> str:
    """Sizes of a case in one line."""
    lens = sorted(set(case.context_lens))
    context = str(lens[0]) if len(lens) == 1 else f"{lens[0]}..{lens[-1]}"
    return (
        f"{case.batch_size} x {context}, {case.num_q_heads}/{case.num_kv_heads} heads, D {case.head_dim}, "
        f"page {case.page_size}, {case.dtype}, {case.layout}, {case.kv_bytes / 1e6:.0f} MB of K and V"
    )
