"""`bench merge`: merge_states on states that lie in no cache, checked against float64, beside the time to read them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cupy_kernels import merge_states

from . import accuracy, floor, timing
from .cases import COLD_BYTES, DTYPES, normal


@dataclass(frozen=True)
class MergeCase:
    """`rows` merges of `num_states` states each."""

    rows: int
    num_states: int
    head_dim: int = 128
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Rows x states x head_dim."""
        return f"{self.rows}x{self.num_states}x{self.head_dim}"

    @property
    def bytes_read(self) -> int:
        """Bytes of o of all states."""
        return self.rows * self.num_states * self.head_dim * DTYPES[self.dtype].itemsize


# What decode of one, 8 and 64 requests of 32 heads leaves behind, a cascade of two, and many rows.
MERGE_CASES = (MergeCase(32, 64), MergeCase(256, 16), MergeCase(2048, 4), MergeCase(8192, 2), MergeCase(65536, 8))


def run(case: MergeCase, xp: ModuleType, seed: int, repeats: int, cold_bytes: int = COLD_BYTES) -> dict[str, Any]:
    """The row of a case. ValueError where a merged state is wrong."""
    num_sets = 2 * min(512, max(1, math.ceil(cold_bytes / case.bytes_read / 2)))
    shape = (num_sets, case.rows, case.num_states)
    o = normal(xp, (*shape, case.head_dim), DTYPES[case.dtype], seed)
    lse = 3 * normal(xp, shape, np.dtype(np.float32), seed + 1)
    # A state nobody attended, and garbage beside it.
    lse[:, ::7, 0] = -np.inf
    o[:, ::7, 0] = np.nan
    call = lambda i: merge_states(o[i], lse[i])
    for i in (0, num_sets - 1):
        check(case, *(accuracy.on_host(x) for x in (o[i, :64], lse[i, :64], *(x[:64] for x in call(i)))))
    row: dict[str, Any] = dict.fromkeys(("case", "us", "read_us", "host_us", "exact_fraction", "rho"))
    ours = timing.measure(call, num_sets, repeats)
    halves = o[: num_sets // 2], o[num_sets // 2 :]
    read_us = floor.read_floor(halves, case.bytes_read, num_sets, repeats)
    return row | {
        "case": case.name, "us": ours.us, "read_us": read_us, "host_us": timing.host_us(call, num_sets), "peers": {},
        "spread": ours.spread, "floor_share": read_us / ours.us, "kv_bytes": case.bytes_read, "path": "merge_states",
        "sizes": f"{case.rows} rows of {case.num_states} states, D {case.head_dim}, {case.dtype}",
    }  # fmt: skip


def check(case: MergeCase, o: np.ndarray, lse: np.ndarray, got_o: np.ndarray, got_lse: np.ndarray) -> None:
    """Merged states [rows, D] and [rows] against float64."""
    o, lse = o.astype(np.float64), lse.astype(np.float64)
    highest = lse.max(-1, keepdims=True)
    weight = np.exp(lse - np.where(np.isneginf(highest), 0, highest))[..., None]
    terms = np.where(weight == 0, 0, weight * np.where(weight == 0, 0, o))
    total = np.where(weight.sum(-2) == 0, 1, weight.sum(-2))
    want, size = terms.sum(-2) / total, abs(terms).sum(-2) / total
    with np.errstate(divide="ignore"):
        want_lse = (highest + np.log(weight.sum(-2)))[..., 0]
    # Exponentials to 2 ulp, a sum of num_states terms: a few units of the merge's float32 beside the output's own rounding.
    units = accuracy.UNIT[case.dtype] * abs(want) + (16 + case.num_states) * accuracy.UNIT["float32"] * size
    finite = ~np.isneginf(want_lse)
    good: Callable[[Any], bool] = lambda close: bool(np.all(close))
    if not good(abs(got_o - want) <= units):
        raise ValueError(f"{case.name}: expected merged o as in float64, got {abs(got_o - want).max():.3g} beside it")
    if not (good(abs(got_lse - want_lse)[finite] <= 1e-5) and good(np.isneginf(got_lse[~finite]))):
        raise ValueError(f"{case.name}: expected merged lse as in float64, got others")
