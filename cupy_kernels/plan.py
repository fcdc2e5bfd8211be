"""How many splits, and which pages each: host integers in, host integers out."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .arrays import check_int
from .problem import MAX_GRID_YZ, MAX_HEADS_PER_BLOCK

# Splits of the two-launch schedules lie on grid.z.
MAX_SPLITS = MAX_GRID_YZ
# What the time of a number of splits is made of, as measured on an H200 (bench/NOTES.md), in tokens of one KV head that an SM
# streams while all are at work (0.015 us each on tensor cores): the start of its blocks, or of a launch; one state more to merge.
START, MERGE = 250, 8
# What the last turn takes of a full one, if a part x of all blocks is left for it: ALONE + (1 - ALONE) x^2. A block has more of
# the memory to itself the fewer there are, up to what one can use.
ALONE = 0.62
# The last turn takes as much more where an SM runs many blocks, for these don't end together.
UNEVEN = 0.04
# What the last turn takes at least, beyond its blocks' part of a full one, where lengths differ: nobody knows what is left then.
RAGGED = 0.3
# A split that gains less than this part is none.
LEAST_GAIN = 0.03
# More turns than this are never worth their starts.
MAX_TURNS = 8


def split_ranges(context_len: int, page_size: int, num_splits: int) -> list[tuple[int, int]]:
    """The pages [begin, end) of each split under `schedule="uniform"`.

    With n = ceil(context_len / page_size) pages and pps = ceil(n / num_splits), split i has the pages
    [min(i * pps, n), min((i + 1) * pps, n)): equal shares, the last ones short or empty.

    Args:
        context_len: tokens of the request, >= 0.
        page_size: tokens of a page, >= 1.
        num_splits: >= 1.

    Raises:
        TypeError, ValueError: an argument that is no integer, or out of range.
    """
    context_len = check_int("context_len", context_len, 0, 2**31 - 1)
    page_size = check_int("page_size", page_size, 1, 2**31 - 1)
    num_splits = check_int("num_splits", num_splits, 1, 2**31 - 1)
    pages = math.ceil(context_len / page_size)
    pages_per_split = math.ceil(pages / num_splits)
    return [
        (min(i * pages_per_split, pages), min((i + 1) * pages_per_split, pages)) for i in range(num_splits)
    ]  # fmt: skip


def plan_splits(
    context_lens: Sequence[int] | Any, *, page_size: int, num_q_heads: int, num_kv_heads: int, num_sms: int,
    blocks_per_sm: int | None = None, heads_per_block: int = MAX_HEADS_PER_BLOCK,
) -> int:  # fmt: skip
    """The number of splits for the two-launch schedules.

    Splitting pays when there are fewer blocks than the device can hold: unsplit, there is one for each request and KV head.

    With `blocks_per_sm`, that of the kernel, the number is the one whose time comes out least: of whole turns of blocks on all
    multiprocessors, of a last one that is not full, of a start for each turn, and of the merge.

    Without it, two limits meet. Four blocks an SM keep the memory busy, more only add partials. And a block walks its pages one
    after the other while the merge walks the splits: pages / S + S / 2 steps, least at S = sqrt(2 pages). From three blocks an SM
    on, no split pays. Both limits are rounded to powers of two, the first up, the second down.

    Lengths that differ count as so many requests of the longest one's length as hold the same tokens: it is the longest one that
    the others wait for.

    Args:
        context_lens: tokens of each request, host integers >= 0.
        page_size: tokens of a page, >= 1.
        num_q_heads: a multiple of num_kv_heads.
        num_kv_heads: >= 1.
        num_sms: multiprocessors of the device, >= 1.
        blocks_per_sm: blocks of the kernel that an SM runs at once, >= 1; None: few warps a block, and no such number is known.
        heads_per_block: query heads of one KV head that a block takes at most, >= 1.

    Returns:
        The number of splits, >= 1.

    Raises:
        TypeError, ValueError: an argument of another kind, or out of range.
    """
    page_size = check_int("page_size", page_size, 1, 2**31 - 1)
    num_kv_heads = check_int("num_kv_heads", num_kv_heads, 1, 2**31 - 1)
    num_q_heads = check_int("num_q_heads", num_q_heads, 1, 2**31 - 1)
    num_sms = check_int("num_sms", num_sms, 1, 2**31 - 1)
    heads_per_block = check_int("heads_per_block", heads_per_block, 1, 2**31 - 1)
    if blocks_per_sm is not None:
        blocks_per_sm = check_int("blocks_per_sm", blocks_per_sm, 1, 2**31 - 1)
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_q_heads}")
    lengths = np.asarray(context_lens)
    if lengths.size and lengths.dtype.kind not in "iu":
        raise TypeError(f"context_lens: expected integers, got dtype {lengths.dtype}")
    if lengths.ndim != 1:
        raise ValueError(f"context_lens: expected shape [batch_size], got {list(lengths.shape)}")
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"context_lens: expected lengths >= 0, got {lengths.min()}")
    pages = -(-lengths.astype(np.int64) // page_size)
    pages = pages[pages > 0]
    if not pages.size:
        return 1
    longest, total = int(pages.max()), int(pages.sum())
    columns = num_kv_heads * math.ceil(num_q_heads / num_kv_heads / heads_per_block)
    if blocks_per_sm is not None:
        equal = bool(pages.min() == longest)
        return _fastest(len(pages) * columns, total * columns, longest, equal, page_size, num_sms, blocks_per_sm)
    blocks = total / longest * columns
    if blocks >= 3 * num_sms:
        return 1
    to_fill = 2 ** math.ceil(math.log2(4 * num_sms / blocks))
    to_balance = 2 ** math.floor(math.log2(math.sqrt(2 * longest)))
    return min(to_fill, to_balance, longest)


@functools.lru_cache(1024)
def _fastest(blocks: int, total: int, longest: int, equal: bool, page_size: int, num_sms: int, blocks_per_sm: int) -> int:
    """The number of splits of least modelled time, for `blocks` unsplit ones of `total` pages together and at most `longest`."""
    slots = num_sms * blocks_per_sm
    splits = np.arange(1, min(longest, MAX_SPLITS, max(1, MAX_TURNS * slots * longest // total)) + 1)
    # Of numbers that give a split as many pages, the least.
    splits = splits[-(-longest // -(-longest // splits)) == splits]
    tokens = -(-longest // splits) * page_size
    turns = total / longest * splits / slots
    left = turns - np.ceil(turns) + 1
    idle = np.maximum(ALONE + (1 - ALONE) * left**2 - left, 0.0 if equal else RAGGED) + UNEVEN * (1 - 1 / blocks_per_sm)
    time = blocks_per_sm * tokens * (turns + idle) + START / blocks_per_sm * np.ceil(blocks * splits / slots)
    time += np.where(splits > 1, START + MERGE * splits, 0)
    return int(splits[np.argmin(time)]) if time.min() < (1 - LEAST_GAIN) * time[0] else 1
