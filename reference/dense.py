"""The oracle: unsplit paged decode attention in float64.

One query head, scores `s_j = sm_scale * q.k_j` over the visible context:

    out = sum_j exp(s_j - m) v_j / l,    l = sum_j exp(s_j - m),    m = max_j s_j,    lse = m + log l

`(out, lse)` is the attention state of the request, `(0, -inf)` the state of a request that sees no key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

Shape = tuple[int | None, ...]
FLOAT8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
FLOATS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, *FLOAT8)))

# Non-finite inputs are legal and have a defined result; inf - inf and 0 * inf on the way there are no fault.
nonfinite_is_legal = np.errstate(invalid="ignore", over="ignore")


def paged_decode(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    page_table: np.ndarray,
    context_lens: np.ndarray,
    *,
    sm_scale: float | None = None,
    layout: str = "NHD",
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one query token per request over its paged context, in float64.

    The order is scale -> ALiBi -> soft cap -> mask. A visible key with a score of -inf has weight 0 and its
    value is not looked at, exactly as if it were masked; any other visible NaN or inf reaches the output. A
    score of +inf makes its head NaN.

    Args:
        q: `[batch_size, num_q_heads, head_dim]`, any real floating dtype.
        k_cache, v_cache: `[pool_pages, page_size, num_kv_heads, head_dim]` (`layout="NHD"`) or
            `[pool_pages, num_kv_heads, page_size, head_dim]` (`"HND"`). Query head h reads KV head
            `h // group_size`.
        page_table: `[batch_size, max_pages]`, integers. Entries past the last page of a request, or of pages
            wholly before its window, are never read.
        context_lens: `[batch_size]`, integers in `[0, max_pages * page_size]`, in tokens.
        sm_scale: factor of `q.k`, finite; None is `1 / sqrt(head_dim)`.
        window: only the last `window >= 1` keys are visible, the current one included.
        softcap: `s -> softcap * tanh(s / softcap)`, `softcap > 0`.
        sinks: `[num_q_heads]`, one natural-log logit per head with value 0, neither scaled nor capped.
        alibi_slopes: `[num_q_heads]`; adds `slope * (j - (context_len - 1))` to the score of key j.

    Returns:
        `out [batch_size, num_q_heads, head_dim]` and `lse [batch_size, num_q_heads]` (natural log), float64.

    Raises:
        TypeError: kind or dtype of an argument.
        ValueError: a shape, layout or range; a page id outside the pool for a page that must be read.
    """
    problem = Problem.checked(
        q, k_cache, v_cache, page_table, context_lens, sm_scale, layout, window, softcap, sinks, alibi_slopes
    )
    out = np.zeros(problem.q.shape)
    lse = np.full(problem.q.shape[:2], -np.inf)
    for b, begin, end in problem.requests():
        s = scores(
            problem.q[b],
            problem.keys(b, begin, end),
            begin,
            end,
            sm_scale=problem.sm_scale,
            softcap=problem.softcap,
            alibi_slopes=problem.alibi_slopes,
        )
        out[b], lse[b] = attend(s, problem.values(b, begin, end), sinks=problem.sinks)
    return out, lse


def visible_range(context_len: int, window: int | None = None) -> tuple[int, int]:
    """The tokens `[begin, end)` that the query of a request sees: all of them, or the last `window >= 1`."""
    return (0 if window is None else max(0, context_len - window)), context_len


@nonfinite_is_legal
def gather(
    cache: np.ndarray,
    page_table_row: np.ndarray,
    begin: int,
    end: int,
    layout: str = "NHD",
) -> np.ndarray:
    """Tokens `[begin, end)` of one request as contiguous float64 `[end - begin, num_kv_heads, head_dim]`.

    `cache` is laid out as in `paged_decode`, `page_table_row` is `[max_pages]`. Only the table entries and
    the slots of these tokens are read. ValueError if one of the entries is outside `[0, pool_pages)`.
    """
    tokens = np.arange(begin, end)
    page_size = cache.shape[2 if layout == "HND" else 1]
    pages, slots = page_table_row[tokens // page_size], tokens % page_size
    # NumPy would read a negative id from the end of the pool without a word.
    strays = np.unique(pages[(pages < 0) | (pages >= len(cache))]).tolist()
    expect(not strays, "page_table", f"page ids in [0, {len(cache)})", strays)
    rows = cache[pages, :, slots] if layout == "HND" else cache[pages, slots]
    return rows.astype(np.float64)


@nonfinite_is_legal
def scores(
    q: np.ndarray,
    k: np.ndarray,
    begin: int,
    context_len: int,
    *,
    sm_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> np.ndarray:
    """Scores `[num_q_heads, num_tokens]` (float64) of one request's tokens from position `begin` on.

    `q [num_q_heads, head_dim]`; `k [num_tokens, num_kv_heads, head_dim]` as `gather` gives it; the rest as in
    `paged_decode`. Nothing is checked.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    sm_scale = 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale
    # einsum, not a BLAS product: some BLAS skip zero factors, and 0 * NaN would be lost.
    grouped = q.astype(np.float64).reshape(num_kv_heads, -1, head_dim)
    s = sm_scale * np.einsum("hgd,thd->hgt", grouped, k).reshape(len(q), num_tokens)
    if alibi_slopes is not None:
        s = s + alibi_slopes[:, None] * (np.arange(begin, begin + num_tokens) - (context_len - 1))
    return s if softcap is None else softcap * np.tanh(s / softcap)


@nonfinite_is_legal
def attend(s: np.ndarray, v: np.ndarray, *, sinks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of `s [num_q_heads, num_tokens]` applied to `v [num_tokens, num_kv_heads, head_dim]`, float64.

    A score of -inf hides its key, value included; `sinks [num_q_heads]` is one more score per head, of value
    0. Returns `(o [num_q_heads, head_dim], lse [num_q_heads])`, natural log, `(0, -inf)` where nothing is
    visible.
    """
    group_size = len(s) // v.shape[1]
    if sinks is not None:
        s = np.concatenate([s, sinks[:, None]], axis=1)
        v = np.concatenate([v, np.zeros((1, *v.shape[1:]))])
    m = s.max(axis=1, initial=-np.inf)
    # With every score -inf, -inf - m would be NaN. A NaN or +inf in m must stay, and makes its head NaN.
    p = np.exp(s - np.where(m == -np.inf, 0, m)[:, None])
    l = p.sum(axis=1)
    # Tokens last and contiguous: there NumPy sums pairwise, with an error of log2(n) roundings, not n.
    v_by_head = np.ascontiguousarray(v.transpose(1, 2, 0))
    acc = np.empty((len(s), v.shape[2]))
    for h, seen in enumerate(s != -np.inf):
        acc[h] = (p[h] * v_by_head[h // group_size]).sum(axis=1, where=seen)
    # Empty is l == 0, and only that: acc is 0 and m is -inf there already. l > 0 would take NaN for empty.
    l = np.where(l == 0, 1, l)
    return acc / l[:, None], m + np.log(l)


@dataclass(frozen=True)
class Problem:
    """The checked arguments of a decode, shapes as in `paged_decode`."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    page_table: np.ndarray
    context_lens: np.ndarray
    sm_scale: float
    layout: str
    window: int | None
    softcap: float | None
    sinks: np.ndarray | None  # float64
    alibi_slopes: np.ndarray | None  # float64

    @property
    def page_size(self) -> int:
        return int(self.k_cache.shape[2 if self.layout == "HND" else 1])

    def requests(self) -> Iterator[tuple[int, int, int]]:
        """Yield `(b, begin, end)`: every request with its visible tokens; `end` is its context length."""
        for b, context_len in enumerate(self.context_lens.tolist()):
            yield b, *visible_range(context_len, self.window)

    def keys(self, b: int, begin: int, end: int) -> np.ndarray:
        """K of tokens `[begin, end)` of request b, as `gather` gives it."""
        return gather(self.k_cache, self.page_table[b], begin, end, self.layout)

    def values(self, b: int, begin: int, end: int) -> np.ndarray:
        """V of tokens `[begin, end)` of request b, as `gather` gives it."""
        return gather(self.v_cache, self.page_table[b], begin, end, self.layout)

    @staticmethod
    def checked(
        q: np.ndarray,
        k_cache: np.ndarray,
        v_cache: np.ndarray,
        page_table: np.ndarray,
        context_lens: np.ndarray,
        sm_scale: float | None,
        layout: str,
        window: int | None,
        softcap: float | None,
        sinks: np.ndarray | None,
        alibi_slopes: np.ndarray | None,
    ) -> Problem:
        """Check all but the page ids, which `gather` checks where it reads them; fill in `sm_scale`."""
        expect(layout in ("NHD", "HND"), "layout", "'NHD' or 'HND'", repr(layout))
        check_array("q", q, (None, None, None))
        batch_size, num_q_heads, head_dim = q.shape
        check_array("k_cache", k_cache, (None, None, None, head_dim))
        num_kv_heads, page_size = k_cache.shape[1:3] if layout == "HND" else k_cache.shape[2:0:-1]
        check_array("v_cache", v_cache, k_cache.shape)
        expect(
            min(head_dim, page_size, num_kv_heads) >= 1,
            "k_cache",
            "no empty axis but the first",
            k_cache.shape,
        )
        whole_groups = num_q_heads >= 1 and num_q_heads % num_kv_heads == 0
        expect(whole_groups, "q", f"num_q_heads a multiple of {num_kv_heads} KV heads", num_q_heads)
        check_array("page_table", page_table, (batch_size, None), integers=True)
        check_array("context_lens", context_lens, (batch_size,), integers=True)
        capacity = page_table.shape[1] * page_size
        in_range = np.all((context_lens >= 0) & (context_lens <= capacity))
        expect(bool(in_range), "context_lens", f"lengths in [0, {capacity}]", context_lens.tolist())
        sm_scale = 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale
        expect(math.isfinite(sm_scale), "sm_scale", "a finite number", sm_scale)
        if window is not None:
            expect(isinstance(window, (int, np.integer)), "window", "an integer", type(window), TypeError)
            expect(window >= 1, "window", "at least 1", window)
        if softcap is not None:
            expect(0 < softcap < math.inf, "softcap", "a finite number above 0", softcap)
        for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
            if per_head is not None:
                check_array(name, per_head, (num_q_heads,))
        sinks = None if sinks is None else sinks.astype(np.float64)
        alibi_slopes = None if alibi_slopes is None else alibi_slopes.astype(np.float64)
        caches = (k_cache, v_cache, page_table, context_lens)
        return Problem(q, *caches, float(sm_scale), layout, window, softcap, sinks, alibi_slopes)


def expect(
    condition: bool,
    name: str,
    expected: str,
    got: object,
    error: type[Exception] = ValueError,
) -> None:
    """Raise `error` with the text `name: expected ..., got ...` unless the condition holds."""
    if not condition:
        raise error(f"{name}: expected {expected}, got {got}")


def check_array(name: str, array: np.ndarray, shape: Shape, *, integers: bool = False) -> None:
    """TypeError unless a float (or an integer) array, ValueError unless of this shape; None: any length."""
    expect(isinstance(array, np.ndarray), name, "a NumPy array", type(array), TypeError)
    if integers:
        expect(array.dtype.kind in "iu", name, "an integer dtype", array.dtype, TypeError)
    else:
        expect(array.dtype in FLOATS, name, f"one of {', '.join(map(str, FLOATS))}", array.dtype, TypeError)
    same_ndim = array.ndim == len(shape)
    matches = same_ndim and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
    wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    expect(matches, name, f"shape {wanted}", list(array.shape))
