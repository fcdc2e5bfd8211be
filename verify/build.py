"""The arrays that a case stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import DTYPES
from .families import FAMILIES, Shape
from .inputs import Inputs, default_scale

if TYPE_CHECKING:
    from .cases import Case

POISON = {"nan": np.nan, "inf": np.inf, "large": 3e4, "zero": 0.0}
ABSURD_PAGES = np.array([-1, 2**31 - 1], np.int32)


def build(case: Case) -> Inputs:
    """The arrays of a case: pages scattered over a pool larger than needed, poison in all that must not be read.

    Poison fills unused slots of last pages, unused pages and the gaps of strided memory; table entries past the
    last page are -1 and INT_MAX in turn.
    """
    rng = np.random.default_rng((case.seed, 1))
    scale = default_scale(case.head_dim, case.sm_scale)
    lens = np.array(case.context_lens, np.int32)
    counts = -(-lens // case.page_size)
    used = int(counts.sum())
    k_cache, v_cache, q = _memory(case, used + used // 4 + 3)
    ids = _page_ids(case, rng, used, len(k_cache))

    table = np.resize(ABSURD_PAGES, (len(lens), int(counts.max(initial=0)) + 2)).astype(np.int32)
    starts = np.cumsum([0, *counts])
    for b, count in enumerate(counts):
        table[b, :count] = ids[starts[b] : starts[b + 1]]
        if case.pages == "shared" and b:
            common = min(count, counts[0]) // 2
            table[b, :common] = table[0, :common]
    exact = np.full(q.shape, np.nan)
    for b in reversed(range(len(lens))):
        for kv_head in range(case.num_kv_heads):
            _fill_head(case, scale, b, kv_head, (q, k_cache, v_cache, table, exact))
    promised = FAMILIES[case.family].exact is not None and case.pages != "shared"
    return Inputs(
        q, k_cache, v_cache, table, lens, scale, case.layout,
        exact=exact if promised else None,
        exact_in_16_bits_only=FAMILIES[case.family].exact_in_16_bits_only,
    )  # fmt: skip


def _memory(case: Case, pool_pages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """K and V full of poison and q full of NaN, as views of the memory that the case names."""
    dtype, d = DTYPES[case.dtype], case.head_dim
    poison = np.float64(POISON[case.poison]).astype(dtype)
    axes = (case.page_size, case.num_kv_heads) if case.layout == "NHD" else (case.num_kv_heads, case.page_size)
    shape = (pool_pages, *axes)
    q_shape = (len(case.context_lens), case.num_q_heads, d)
    q = np.full(q_shape, np.nan, dtype)
    if case.memory == "interleaved":
        both = np.full((*shape, 2, d), poison, dtype)
        return both[..., 0, :], both[..., 1, :], q
    if case.memory == "stacked":
        both = np.full((pool_pages, 2, *axes, d), poison, dtype)
        return both[:, 0], both[:, 1], q
    if case.memory == "padded":
        k, v = (np.full((*shape, d + pad), poison, dtype)[..., :d] for pad in (8, 16))
        return k, v, np.full((q_shape[0], q_shape[1] + 1, d + 8), np.nan, dtype)[:, :-1, :d]
    return np.full((*shape, d), poison, dtype), np.full((*shape, d), poison, dtype), q


def _page_ids(case: Case, rng: np.random.Generator, used: int, pool_pages: int) -> np.ndarray:
    if case.pages in ("ordered", "reversed"):
        ids = np.arange(used)
        return ids[::-1] if case.pages == "reversed" else ids
    return rng.permutation(pool_pages)[:used]


def _fill_head(case: Case, scale: float, b: int, kv_head: int, arrays: tuple[np.ndarray, ...]) -> None:
    """q, K, V and the exact output of one request and KV head, into place."""
    q, k_cache, v_cache, table, exact = arrays
    length, group = case.context_lens[b], slice(kv_head * case.group_size, (kv_head + 1) * case.group_size)
    pages = -(-length // case.page_size)
    per_split = case.pages_per_split if case.schedule == "fixed" else -(-pages // (case.num_splits or 4))
    shape = Shape(
        context_len=max(1, length),
        group_size=case.group_size,
        head_dim=case.head_dim,
        dtype=case.dtype,
        sm_scale=scale,
        tokens_per_split=(per_split or 1) * case.page_size,
        page_size=case.page_size,
        kv_head=kv_head,
    )
    family = FAMILIES[case.family]
    q[b, group], k, v = family.draw((case.seed, b, kv_head), shape)
    if length == 0:
        return
    if family.exact is not None:
        exact[b, group] = family.exact(shape, q[b, group], k, v)
    tokens = np.arange(length)
    page, slot = table[b, tokens // case.page_size], tokens % case.page_size
    for cache, rows in ((k_cache, k), (v_cache, v)):
        if case.layout == "NHD":
            cache[page, slot, kv_head] = rows
        else:
            cache[page, kv_head, slot] = rows
