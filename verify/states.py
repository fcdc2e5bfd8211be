"""States to merge: what other kernels hand over, and where a merge goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arithmetic import DTYPES

INF, NAN = np.inf, np.nan


@dataclass(frozen=True)
class StateCase:
    """One merge. `build_states(case)` gives its arrays; the repr gives the case."""

    name: str
    # natural lse of the states, for every row alike, + `spread` randn
    lse: tuple[float, ...]
    spread: float = 0.0
    # leading shape: rows of requests and query heads
    rows: tuple[int, ...] = (2, 3)
    head_dim: int = 16
    # of o: "float16", "bfloat16", "float32"
    dtype: str = "float32"
    # o of states whose lse is -inf: must not be looked at
    absent: float = NAN
    seed: int = 0


def build_states(case: StateCase) -> tuple[np.ndarray, np.ndarray]:
    """`o [*rows, num_states, head_dim]` in the case's dtype and `lse [*rows, num_states]` float32."""
    rng = np.random.default_rng((case.seed, 2))
    noise = rng.standard_normal((*case.rows, len(case.lse)))
    lse = (np.array(case.lse) + case.spread * noise).astype(np.float32)
    o = rng.standard_normal((*lse.shape, case.head_dim))
    o = np.where(np.isneginf(lse)[..., None], case.absent, o)
    return o.astype(DTYPES[case.dtype]), lse


states = [
    StateCase("one", (1.5,)),
    StateCase("two", (0.0, 1.0), spread=1.0),
    StateCase("far", (0.0, 10.0)),
    StateCase("both-empty", (-INF, -INF)),
    StateCase("left-empty", (-INF, 2.0)),
    StateCase("right-empty", (2.0, -INF)),
    StateCase("all-empty", (-INF,) * 7),
    StateCase("some-empty", (-INF, 1.0, -INF, 2.0, -INF), absent=INF),
    StateCase("empty-holds-1e30", (-INF, 1.0, 0.5), absent=1e30),
    # Above and below every finite number that has been used for minus infinity, and beyond exp's range.
    StateCase("overflow", (300.0, 301.0, 299.0), spread=1.0),
    StateCase("below-sentinels", (-6e4, -6e4 + 1, -1e5), spread=0.5),
    StateCase("below-1e30", (-2e30, -INF)),
    # "Empty" of other kernels: not ours, and nothing is guessed, so NaN comes out.
    StateCase("foreign-inf", (INF, 1.0)),
    StateCase("foreign-nan", (NAN, 1.0)),
    StateCase("prefix-suffix", (np.log(3072), np.log(64)), spread=0.3),
    StateCase("rising", tuple(np.linspace(-5, 5, 33))),
    StateCase("falling", tuple(np.linspace(5, -5, 33))),
    StateCase("many-states", (0.0,) * 200, spread=2.0),
    *(StateCase(f"heads-{n}", (0.0, 1.0, -INF), spread=1.0, rows=(2, n)) for n in (65, 200)),
    *(StateCase(f"dim-{d}", (0.0, 1.0, 2.0), spread=1.0, head_dim=d) for d in (1, 3, 80, 257)),
    *(StateCase(f"dtype-{t}", (0.0, 1.0, 2.0), spread=1.0, dtype=t) for t in DTYPES if t != "float64"),
    StateCase("no-rows", (0.0, 1.0), rows=(0, 4)),
]
