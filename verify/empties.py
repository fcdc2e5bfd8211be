"""Experiment: where NaN gets to from splits that are empty, with and without guards in the partial and in the merge kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_kernels import jit, paged_decode

from .cases import Case, build
from .inputs import Inputs
from .kernels import on_device
from .mutants import UNGUARDED_MERGE, UNGUARDED_PARTIAL

# (guarded partial, guarded merge)
GUARDS = ((True, True), (True, False), (False, True), (False, False))
SCHEDULES: dict[str, dict[str, Any]] = {
    "unsplit": {"num_splits": 1},
    "4 splits": {"num_splits": 4},
    "a page each": {"schedule": "fixed", "pages_per_split": 1},
}


@dataclass(frozen=True)
class Pattern:
    """Lengths of a batch of 4 requests on pages of 16 tokens, with 4 query heads on 2 KV heads."""

    name: str
    lens: tuple[int, int, int, int]
    # tokens of KV head 1 whose scores are all -inf, per request: a head may see nothing where others see something
    hidden: tuple[int, int, int, int] = (0, 0, 0, 0)


PATTERNS = (
    Pattern("all full", (64, 64, 64, 64)),
    Pattern("short ones", (64, 40, 17, 1)),
    Pattern("none at all", (64, 0, 17, 0)),
    Pattern("only empty", (0, 0, 0, 0)),
    Pattern("scores of -inf", (64, 64, 64, 64), hidden=(64, 16, 0, 33)),
)


def inputs_of(pattern: Pattern, seed: int = 0) -> Inputs:
    """Standard normal inputs, q above 0, and K = -inf in hidden tokens: their scores are -inf."""
    case = Case(
        f"empties-{pattern.name}", context_lens=pattern.lens, seed=seed, num_q_heads=4, num_kv_heads=2, head_dim=32,
        out_dtype="float32",
    )  # fmt: skip
    inputs = build(case)
    np.abs(inputs.q, out=inputs.q)
    for b, hidden in enumerate(pattern.hidden):
        tokens = np.arange(hidden)
        inputs.k_cache[inputs.page_table[b, tokens // case.page_size], tokens % case.page_size, 1] = -np.inf
    return inputs


def non_finite(inputs: Inputs, schedule: str, guards: tuple[bool, bool], device: str = "cpu") -> np.ndarray:
    """`[batch_size, num_q_heads]` bool: heads with a NaN in o or lse, by kernels with these guards."""
    xp: Any = np
    if device == "gpu":
        import cupy as xp  # type: ignore[no-redef]
    patches: jit.Patches = (() if guards[0] else UNGUARDED_PARTIAL) + (() if guards[1] else UNGUARDED_MERGE)
    with jit.settings(patches=patches, readable=True):
        out, lse = paged_decode(**on_device(inputs, xp), **SCHEDULES[schedule], out_dtype="float32")
    found = xp.isnan(out).any(-1) | xp.isnan(lse)
    return found if xp is np else xp.asnumpy(found)


Maps = dict[tuple[bool, bool], dict[str, dict[str, np.ndarray]]]


def maps(device: str = "cpu", seed: int = 0, progress: Callable[[str], object] = lambda name: None) -> Maps:
    """`[guards][pattern][schedule]` -> `non_finite`."""
    found: Maps = {}
    for guards in GUARDS:
        found[guards] = {}
        for pattern in PATTERNS:
            inputs = inputs_of(pattern, seed)
            found[guards][pattern.name] = {name: non_finite(inputs, name, guards, device) for name in SCHEDULES}
        progress(words(guards))
    return found


def words(guards: tuple[bool, bool]) -> str:
    """Which kernels have guards."""
    return {
        (True, True): "both guarded", (True, False): "merge unguarded", (False, True): "partial unguarded",
        (False, False): "neither guarded",
    }[guards]  # fmt: skip
