"""The kinds of input that mutants are shown: a case, the path it takes through the kernels, and what that path must give.

All run the two-launch kernels on outputs that hold NaN, or the partial states of an earlier, longer call.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import reference
from cupy_kernels import merge_state_in_place, merge_states, paged_decode, split_decode
from cupy_kernels.decode import bind_partial
from cupy_kernels.problem import NOT_YET, check_problem

from .arithmetic import DTYPES, Arithmetic, Order, tiled_order
from .budget import Budget, decode_budget, partial_budget
from .build import POISON, build
from .cases import FINITE, NON_FINITE, Case
from .inputs import Inputs
from .kernels import arithmetic, on_device
from .tiers import compare
from .verdict import Report

# Elements between pages of the pool that needs 64-bit offsets: page 4 begins at 2^32.
FAR = 2**30


@dataclass(frozen=True)
class Probe:
    """One kind of input."""

    # what the matrix calls it; the family's name where there is nothing else to say
    kind: str
    case: Case
    # "staged": partial states and their merge; "unsplit": the whole decode in one launch; "in_place": two states, one
    # merged into the other; "far": staged, from a pool of more than 2^32 elements
    path: str = "staged"
    # keys seen by each query, the last ones; None: all
    window: int | None = None
    # tokens per request of a call before, whose partial states lie in the workspaces; 0: these are full of NaN
    stale: int = 0
    # what most projects test with: standard normal, zeros in all that must not be read
    classic: bool = False


def _staged(kind: str, family: str = "normal", lens: tuple[int, ...] = (100, 64, 37), **fields: Any) -> Probe:
    """A probe of small cases; head_dim 128, for 1 / sqrt(64) is a power of two and hides what the scale does."""
    own = {name: fields.pop(name) for name in ("path", "window", "stale", "classic") if name in fields}
    return Probe(kind, Case(kind, family=family, context_lens=lens, **{"head_dim": 128, "kernel": "readable", **fields}), **own)


def _classic() -> Iterator[Probe]:
    randn = lambda kind, lens, **fields: _staged(f"randn_{kind}", "normal", lens, poison="zero", classic=True, **fields)
    yield randn("short", (256, 256))
    yield randn("long", (4096,), head_dim=64, num_splits=8)
    yield randn("ragged", (300, 190, 77))
    yield randn("unsplit", (200, 200), path="unsplit", num_splits=1, out_dtype="float32")
    yield randn("mqa", (200, 130), num_kv_heads=1)
    yield randn("window", (256, 256), window=100)


PROBES: tuple[Probe, ...] = (
    *_classic(),
    *(_staged(name, name) for name in [*FINITE, *NON_FINITE]),
    # Lengths: empty splits and requests, among others and alone.
    _staged("empties", "offset_minus", (0, 9, 1, 3, 40)),
    _staged("empty_requests", "normal", (0, 0)),
    # More states than one warp of the merge takes.
    _staged("many_splits", "normal", (310, 37, 150), num_splits=20),
    _staged("one_long", "split_flip", (0, 129, 0), num_splits=3),
    _staged("fixed", "ramp_up", (130, 5, 64), schedule="fixed", num_splits=None, pages_per_split=2),
    # What lies past the length.
    *(_staged(f"tail_{poison}", "pos_v", (13, 1, 0, 30), page_size=4, poison=poison) for poison in POISON),
    # Windows: the key at their edge just outside and just inside, and splits that they empty, the first ones at that.
    _staged("window_needle_out", "needle_first", (65, 65), window=64),
    _staged("window_needle_in", "needle_first", (65, 65), window=65),
    _staged("window_ragged", "normal", (100, 64, 37, 0), window=23),
    _staged("window_short", "offset_minus", (100, 64, 37, 200), window=5),
    # Workspaces that hold the states of longer requests.
    _staged("stale", "normal", (40, 0, 17), stale=128),
    _staged("stale_offset", "offset_minus", (17, 40, 0), stale=128),
    # Blocks have 128 threads: with more dimensions some of them take two.
    _staged("in_place", "normal", (64, 50), path="in_place", num_splits=2, head_dim=192, out_dtype="float32"),
    _staged("in_place_flip", "split_flip", (64, 32), path="in_place", num_splits=2, head_dim=256, out_dtype="float32"),
    _staged("far_pages", "normal", (32, 32), path="far", num_splits=2, pages="ordered"),
    # Enough outputs for the tiers that judge them together.
    _staged("many", "normal", (64,) * 8, num_q_heads=64, num_kv_heads=8),
    _staged("many_flip", "split_flip", (64,) * 8, num_q_heads=64, num_kv_heads=8),
)  # fmt: skip


class Windowed(Inputs):
    """Inputs whose heads show the last `window` tokens alone."""

    window: int = 0

    def head(self, b: int, kv_head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `Inputs.head`, the visible rows."""
        q, k, v = super().head(b, kv_head)
        return q, k[-self.window :], v[-self.window :]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A probe with its inputs and what must come out of them; made once, shown to every mutant."""

    probe: Probe
    inputs: Inputs
    arithmetic: Arithmetic
    # (out, lse) in float64, by the reference's own walk through the pages
    want: tuple[np.ndarray, np.ndarray]
    # the call before, for stale workspaces
    before: Inputs | None

    @property
    def num_splits(self) -> int:
        """Splits of every request."""
        return len(cuts(self.inputs, self.probe.case)[0])

    @functools.cache  # noqa: B019  as many as there are probes
    def budgets(self, cut: str) -> tuple[Budget, Budget]:
        """Bounds of the output and of the partial states, for splits cut at "pages" or "tokens"."""
        window, seen = self.probe.window, self.inputs
        if window is not None:
            seen = Windowed(**vars(seen))
            object.__setattr__(seen, "window", window)
        tokens = cuts(self.inputs, self.probe.case, cut)
        orders = [visible_order(splits, window, self.arithmetic.tile) for splits in tokens]
        return decode_budget(seen, self.arithmetic, orders), partial_budget(seen, self.arithmetic, orders)

    def judge(self, results: dict[str, np.ndarray], cut: str = "pages") -> Report:
        """The tiers on what `execute` returned; splits are compared with those that `cut` makes."""
        budget, partial = self.budgets(cut)
        states = (results["o_part"], results["lse_part"], partial) if "o_part" in results else None
        return compare(
            results["out"], results["lse"], budget, self.arithmetic, family=self.probe.case.family, reference=self.want,
            inputs=None if self.probe.window else self.inputs, partial=states,
        )  # fmt: skip


@functools.cache
def prepare(probe: Probe, seed: int = 0) -> Prepared:
    """Draws the inputs and computes what is expected of them."""
    case = replace(probe.case, seed=probe.case.seed + seed)
    inputs = build(case)
    want = reference.paged_decode(**inputs.call(), window=probe.window)
    lens = (probe.stale,) * len(case.context_lens)
    before = build(replace(case, context_lens=lens, seed=case.seed + 1)) if probe.stale else None
    return Prepared(probe, inputs, arithmetic(case), want, before)


def cuts(inputs: Inputs, case: Case, cut: str = "pages") -> list[list[range]]:
    """Tokens of each split of each request, as many splits for all; "tokens" cuts them as evenly as can be, pages or not."""
    split = [inputs.splits(b, **case.splits()) for b in range(len(inputs.context_lens))]
    most = case.num_splits or -(-inputs.page_table.shape[1] // (case.pages_per_split or 1))
    lens = inputs.context_lens.tolist()
    if cut == "tokens":
        return [[range(i * n // most, (i + 1) * n // most) for i in range(most)] for n in lens]
    return [[*tokens, *[range(n, n)] * (most - len(tokens))] for tokens, n in zip(split, lens, strict=True)]


def visible_order(splits: list[range], window: int | None, tile: int) -> Order:
    """The order of a request whose window hides all but the last tokens, numbered from the first one seen."""
    first = 0 if window is None else max(0, splits[-1].stop - window)
    return tiled_order([range(max(s.start - first, 0), max(s.stop - first, 0)) for s in splits], tile)


def execute(prepared: Prepared, xp: Any) -> dict[str, np.ndarray]:
    """Runs the kernels as they are now, faults included: `out`, `lse` and, where there are any, `o_part`, `lse_part`."""
    probe, case = prepared.probe, prepared.probe.case
    call = (_far_pages if probe.path == "far" else on_device)(prepared.inputs, xp)
    shape, out_dtype = prepared.inputs.q.shape, DTYPES[case.output_dtype]
    if probe.path == "unsplit":
        out, lse = xp.full(shape, np.nan, out_dtype), xp.full(shape[:2], np.nan, np.float32)
        paged_decode(**call, num_splits=1, out_dtype=out_dtype, out=out, lse_out=lse)
        return _to_host(xp, out=out, lse=lse)
    rows, blank = (*shape[:2], prepared.num_splits), 0.0 if probe.classic else np.nan
    o, lse = xp.full((*rows, shape[2]), blank, np.float32), xp.full(rows, blank, np.float32)
    if prepared.before is not None:
        _partial(probe, on_device(prepared.before, xp), o, lse)
    _partial(probe, call, o, lse)
    if probe.path == "in_place":
        first, others = (o[:, :, 0].copy(), lse[:, :, 0].copy()), (o[:, :, 1].copy(), lse[:, :, 1].copy())
        merge_state_in_place(*first, *others)
        merged = first
    else:
        merged = merge_states(o, lse, out_dtype=out_dtype)
    return _to_host(xp, out=merged[0], lse=merged[1], o_part=o, lse_part=lse)


def _partial(probe: Probe, call: dict[str, Any], o: Any, lse: Any) -> None:
    """Partial states into `o [batch_size, num_q_heads, num_splits, head_dim]` and `lse`."""
    splits: dict[str, Any] = {"schedule": probe.case.schedule, **{k: n for k, n in probe.case.splits().items() if n is not None}}
    if probe.window is None:
        split_decode(**call, **splits, out=o, lse_out=lse)
        return
    # The kernels know windows; the public calls will once every schedule does.
    problem = check_problem(**call, lse_base="e", check_values=False, not_yet=NOT_YET)
    bind_partial(replace(problem, window=probe.window), o, lse, probe.case.pages_per_split or 0)()


def _far_pages(inputs: Inputs, xp: Any) -> dict[str, Any]:
    """The same tokens in a pool whose pages lie `FAR` elements apart, as in a view of a cache of many layers.

    On a CPU the pool is a file of holes, on a GPU 8.6 GB of memory, of which only these pages are written.
    """
    ids = np.array([0, 4, 1, 2], np.int32)
    shape, size = inputs.k_cache.shape[1:], int(np.prod(inputs.k_cache.shape[1:]))
    dtype, items = inputs.k_cache.dtype, 4 * FAR + 2 * size
    if xp is np:
        with tempfile.TemporaryFile() as file:
            memory = np.memmap(file, dtype, "w+", shape=(items,)).view(np.ndarray)
    else:
        memory = xp.empty(items, dtype)
    caches = []
    for offset, cache in ((0, inputs.k_cache), (size, inputs.v_cache)):
        strides = (FAR * dtype.itemsize, *cache.strides[1:])
        far = xp.lib.stride_tricks.as_strided(memory[offset:], (5, *shape), strides)
        far[xp.asarray(ids)] = xp.asarray(cache[: len(ids)])
        caches.append(far)
    table = np.where(np.isin(inputs.page_table, range(4)), ids[inputs.page_table % 4], inputs.page_table)
    moved = replace(inputs, k_cache=inputs.q[:0], v_cache=inputs.q[:0], page_table=table)
    return {**on_device(moved, xp), "k_cache": caches[0], "v_cache": caches[1]}


def _to_host(xp: Any, **arrays: Any) -> dict[str, np.ndarray]:
    return arrays if xp is np else {name: xp.asnumpy(array) for name, array in arrays.items()}
