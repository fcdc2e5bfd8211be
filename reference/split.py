"""Split-KV decode as the kernels do it, in a stated precision per stage: partial states, and their merge.

Split s keeps `m_s = max s_j`, `l_s = sum exp(s_j - m_s)`, `o_s = sum exp(s_j - m_s) v_j / l_s` and
`lse_s = m_s + log l_s`; the merge is

    m = max lse_s,  w_s = exp(lse_s - m),  l = sum w_s,  o = sum w_s o_s / l,  lse = m + log l

(Flash-Decoding, 2023; FlashInfer, arXiv 2501.01005; the online form is Milakov and Gimelshein, 2018).

Every array carries the dtype of its stage, so each elementary operation rounds to it, to nearest even. NumPy
and ml_dtypes compute +, -, *, / of 16-bit numbers in float32 and round once more, which is harmless because
24 bits >= 2 * 11 + 2. exp, log and tanh go through float64. Sums are sequential, ascending, and round
after each addition; no fused multiply-add.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np

from .dense import Problem, expect, nonfinite_is_legal

State = tuple[np.ndarray, np.ndarray]
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class Precision:
    """The dtype of each stage: "float16", "bfloat16", "float32" (the default everywhere) or "float64".

    ValueError for any other name.
    """

    # all inputs are rounded to it; q.k (sum over d), scale, ALiBi, soft cap, m and s - m are computed in it
    scores: str = "float32"
    # exp(s - m) is rounded to it, once; these rounded p enter l as well as acc
    p: str = "float32"
    # v is rounded to it; p * v, acc and l (sums over the tokens), acc / l, and m + log l are computed in it
    accumulator: str = "float32"
    # acc / l is stored in it
    o: str = "float32"
    # m + log l is stored in it
    lse: str = "float32"
    # o_s and lse_s are rounded to it, then the whole merge is computed and returned in it
    merge: str = "float32"

    def __post_init__(self) -> None:
        for stage in fields(self):
            name = getattr(self, stage.name)
            expect(name in DTYPES, stage.name, f"one of {', '.join(DTYPES)}", repr(name))

    @staticmethod
    def uniform(name: str) -> Precision:
        """One dtype for all stages."""
        return Precision(name, name, name, name, name, name)


def split_ranges(context_len: int, page_size: int, num_splits: int) -> list[tuple[int, int]]:
    """Pages `[begin, end)` of each of the `num_splits` splits, `ceil(num_pages / num_splits)` pages apiece.

    The last split that has pages may have fewer, and later ones are empty, `(num_pages, num_pages)`.
    `context_len` is in tokens, >= 0; `page_size` and `num_splits` are >= 1; otherwise ValueError.
    """
    expect(context_len >= 0, "context_len", "at least 0", context_len)
    expect(page_size >= 1, "page_size", "at least 1", page_size)
    expect(num_splits >= 1, "num_splits", "at least 1", num_splits)
    num_pages = len(range(0, context_len, page_size))
    return _equal_ranges(num_pages, len(range(0, num_pages, num_splits)), num_splits)


def _equal_ranges(num_pages: int, pages_per_split: int, num_splits: int) -> list[tuple[int, int]]:
    split_of_page = [page // pages_per_split for page in range(num_pages)]
    return [(bisect_left(split_of_page, s), bisect_left(split_of_page, s + 1)) for s in range(num_splits)]


def partial(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    page_table: np.ndarray,
    context_lens: np.ndarray,
    *,
    num_splits: int | None = None,
    pages_per_split: int | None = None,
    sm_scale: float | None = None,
    layout: str = "NHD",
    precision: Precision = Precision(),
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The partial states of every request and query head, by split: pass 1 of the decode.

    Exactly one of `num_splits` and `pages_per_split` (both >= 1) is given; with the latter there are as many
    splits as the longest context needs, and at least one. Cuts are counted on the whole context: a window
    hides keys and may leave leading splits empty, but moves no cut. The other arguments, and what raises, are
    as in `dense.paged_decode`; a sink is the merge's.

    Returns:
        `o_part [batch_size, num_q_heads, num_splits, head_dim]` in dtype `precision.o` and
        `lse_part [batch_size, num_q_heads, num_splits]` in `precision.lse`, natural log; `(0, -inf)` if
        empty.
    """
    problem = Problem.checked(
        q, k_cache, v_cache, page_table, context_lens, sm_scale, layout, window, softcap, None, alibi_slopes
    )
    lens, page_size = context_lens.tolist(), problem.page_size
    num_pages = [len(range(0, n, page_size)) for n in lens]
    if num_splits is not None and pages_per_split is None:
        ranges = [split_ranges(n, page_size, num_splits) for n in lens]
    elif pages_per_split is not None and num_splits is None:
        expect(pages_per_split >= 1, "pages_per_split", "at least 1", pages_per_split)
        num_splits = max([1, *(len(range(0, n, pages_per_split)) for n in num_pages)])
        ranges = [_equal_ranges(n, pages_per_split, num_splits) for n in num_pages]
    else:
        given = f"{num_splits} and {pages_per_split}"
        raise ValueError(f"num_splits: expected either it or pages_per_split, got {given}")
    batch_size, num_q_heads, head_dim = q.shape
    o_part = np.zeros((batch_size, num_q_heads, num_splits, head_dim), DTYPES[precision.o])
    lse_part = np.full(o_part.shape[:3], -np.inf, DTYPES[precision.lse])
    for b, visible_begin, visible_end in problem.requests():
        for s, (page_begin, page_end) in enumerate(ranges[b]):
            begin, end = max(page_begin * page_size, visible_begin), min(page_end * page_size, visible_end)
            if begin < end:
                o_part[b, :, s], lse_part[b, :, s] = _states(problem, b, begin, end, precision)
    return o_part, lse_part


@nonfinite_is_legal
def _states(problem: Problem, b: int, begin: int, end: int, precision: Precision) -> State:
    """The states of all query heads of request b over its tokens `[begin, end)`, at least one."""
    q, k, v = problem.q[b], problem.keys(b, begin, end), problem.values(b, begin, end)
    group_size = len(q) // k.shape[1]
    distance = np.arange(begin, end) - (problem.context_lens[b] - 1)
    in_scores, in_p = _cast(precision.scores), _cast(precision.p)
    in_acc, in_o, in_lse = _cast(precision.accumulator), _cast(precision.o), _cast(precision.lse)
    states = []
    for h in range(len(q)):
        k_h, v_h = k[:, h // group_size], v[:, h // group_size]
        s = _sum(in_scores(q[h]) * in_scores(k_h), axis=1) * in_scores(problem.sm_scale)
        if problem.alibi_slopes is not None:
            s = s + in_scores(problem.alibi_slopes[h]) * in_scores(distance)
        if problem.softcap is not None:
            cap = in_scores(problem.softcap)
            s = cap * _apply(np.tanh, s / cap)
        m = np.maximum.reduce(s)
        p = in_acc(in_p(np.exp((s - _shift(m)).astype(np.float64))))
        # A key of score -inf is hidden, not multiplied by zero.
        pv = np.where((s == -np.inf)[:, None], in_acc(0), p[:, None] * in_acc(v_h))
        o, lse = _normalise(_sum(pv, axis=0), _sum(p, axis=0), in_acc(m))
        states.append((in_o(o), in_lse(lse)))
    return np.stack([o for o, _ in states]), np.stack([lse for _, lse in states])


@nonfinite_is_legal
def merge(
    o_part: np.ndarray,
    lse_part: np.ndarray,
    *,
    precision: Precision = Precision(),
    algorithm: str = "max_first",
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Merge `o_part [..., num_states, head_dim]` by `lse_part [..., num_states]` (natural log), of any dtype.

    `algorithm="max_first"` finds the maximum, then adds the states in order; `"online"` rescales a running
    state whenever a state raises the maximum. They are equal in exact arithmetic. `sinks`, broadcast against
    the leading shape (`[num_q_heads]` for `[batch_size, num_q_heads, ...]`), enters as one more, last, state
    `(0, sink)`.

    A state of lse -inf is selected away, whatever its `o`; merging only such gives `(0, -inf)`. NaN or +inf
    in an lse makes the result NaN. ValueError for zero states, mismatched shapes or an unknown algorithm.

    Returns `o [..., head_dim]` and `lse [...]`, computed and returned in dtype `precision.merge`.
    """
    expect(o_part.shape[:-1] == lse_part.shape, "lse_part", f"shape {o_part.shape[:-1]}", lse_part.shape)
    expect(lse_part.ndim >= 1 and lse_part.shape[-1] >= 1, "lse_part", "at least one state", lse_part.shape)
    expect(algorithm in _ALGORITHMS, "algorithm", f"one of {', '.join(_ALGORITHMS)}", repr(algorithm))
    cast = _cast(precision.merge)
    o, lse = np.moveaxis(cast(o_part), -2, 0), np.moveaxis(cast(lse_part), -1, 0)
    if sinks is not None:
        o = np.concatenate([o, np.zeros_like(o[:1])])
        lse = np.concatenate([lse, np.broadcast_to(cast(sinks), lse[:1].shape)])
    o = np.where((lse == -np.inf)[..., None], cast(0), o)
    return _normalise(*_ALGORITHMS[algorithm](o, lse))


def merge_pair(
    o_a: np.ndarray,
    lse_a: np.ndarray,
    o_b: np.ndarray,
    lse_b: np.ndarray,
    *,
    precision: Precision = Precision(),
) -> tuple[np.ndarray, np.ndarray]:
    """`merge` of two states: `o [..., head_dim]` and `lse [...]` each; returns the same shapes."""
    return merge(np.stack([o_a, o_b], axis=-2), np.stack([lse_a, lse_b], axis=-1), precision=precision)


def _max_first(o: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m = np.maximum.reduce(lse, axis=0)
    w = _apply(np.exp, lse - _shift(m))
    return _sum(w[..., None] * o, axis=0), _sum(w, axis=0), m


def _online(o: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    acc, l, m = np.zeros_like(o[0]), np.zeros_like(lse[0]), np.full_like(lse[0], -np.inf)
    for o_s, lse_s in zip(o, lse, strict=True):
        m_before, m = m, np.maximum(m, lse_s)
        rescale, w = _apply(np.exp, m_before - _shift(m)), _apply(np.exp, lse_s - _shift(m))
        acc, l = acc * rescale[..., None] + w[..., None] * o_s, l * rescale + w
    return acc, l, m


_ALGORITHMS = {"max_first": _max_first, "online": _online}


def _normalise(acc: np.ndarray, l: np.ndarray, m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`(acc / l, m + log l)`. Empty is l == 0, where acc = 0 and m = -inf already: there divide by 1."""
    l = np.where(l == 0, l.dtype.type(1), l)
    return acc / l[..., None], m + _apply(np.log, l)


def _shift(m: np.ndarray) -> np.ndarray:
    """What to subtract before exp: the maximum; 0 where it is -inf, for -inf - -inf is NaN. NaN stays NaN."""
    return np.where(m == -np.inf, m.dtype.type(0), m)


def _sum(x: np.ndarray, axis: int) -> np.ndarray:
    """Sequential sum in x's dtype, rounded after each addition, which `np.sum` does not promise."""
    return np.add.accumulate(x, axis=axis).take(-1, axis=axis)


def _apply(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """An elementary function evaluated in float64 and rounded once to x's dtype."""
    return function(x.astype(np.float64)).astype(x.dtype)


def _cast(name: str) -> Callable[[object], np.ndarray]:
    return lambda x: np.asarray(x).astype(DTYPES[name])
