"""What our kernels do to their numbers, and in which order: the description beside each kernel that its bounds are computed from.

A change of a kernel's arithmetic is a change here.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from cupy_kernels import tensor_core
from cupy_kernels.merge import BATCH, WARPS

from .arithmetic import Arithmetic, Order, tiled_order

if TYPE_CHECKING:
    from .cases import Case


def takes_tensor_cores(case: Case) -> bool:
    """Whether `partial_mma.cu` or `balanced.cu` takes a case; all rows that `build` makes are aligned."""
    return case.kernel == "auto" and case.dtype in tensor_core.DTYPES and case.head_dim in tensor_core.HEAD_DIMS


def readable(case: Case) -> Arithmetic:
    """`partial.cu` and `merge.cu`."""
    return Arithmetic(
        # Chunks of 8 from zero, added in sequence: the first addition, to zero, is exact.
        dot_depth=8 + case.head_dim // 8 - 1,
        pv="fma_tile",
        l_sum="tree",
        tile=32,
        # ln2 as two floats in an FMA.
        lse_m=0.0,
        # A warp takes a batch of states, the next warp the next one.
        merge_ways=WARPS,
        merge_batch=BATCH,
        partial_dtype=case.partial_dtype,
        out_dtype=case.output_dtype,
    )


def tensor_cores(case: Case) -> Arithmetic:
    """`partial_mma.cu` with `merge.cu`, or `balanced.cu`; the arithmetic of both is in tile.cuh and stream.cuh."""
    # A block has more warps for few requests than for many; which it is, depends on the device too.
    configs = [tensor_core.default_config(case.head_dim, case.group_size, requests) for requests in (0, math.inf)]
    float16 = case.dtype == "float16"
    return Arithmetic(
        dot="mma",
        # dots(): two sums side by side.
        dot_chains=2,
        # The scale is the unit of Softmax: it multiplies differences.
        score="bare",
        # WeightFormat: as many parts as the type of what is stored asks for, FOLD 2^10 and LAZY 5 for float16, else 2^-1 and 0.
        p=f"{case.dtype}x{tensor_core.p_parts(case.dtype, _first_stored(case))}",
        p_shift=10 if float16 else -1,
        lazy=5.0 if float16 else 0.0,
        l_from_p=True,
        # accumulate(): each tile from zero, then added to nearest.
        pv="mma_tile",
        # store_states(): a lane's own tokens, then the 8 lanes of a head.
        l_sum="lanes",
        tile=tensor_core.TILE,
        states=max(config.warps for config in configs),
        # scaled_lse(): the scaled maximum is a pair, and ln2 too.
        lse_m=0.0,
        share_ways=_share_ways(case, configs) if case.schedule == "balanced" else (),
        # A warp takes a batch of states, the next warp the next one.
        merge_ways=WARPS,
        merge_batch=BATCH,
        partial_dtype=case.partial_dtype,
        out_dtype=case.output_dtype,
    )


def _first_stored(case: Case) -> str:
    """The type of o that the tensor-core kernel writes: the partial's where it is sure that there are two launches."""
    pages = -(-max(case.context_lens, default=0) // case.page_size)
    two = case.schedule == "uniform" and (case.num_splits or 1) > 1
    two |= case.schedule == "fixed" and (pages > (case.pages_per_split or pages) or case.partial_dtype != "float32")
    return case.partial_dtype if two else case.output_dtype


def _share_ways(case: Case, configs: list[tensor_core.Config]) -> tuple[int, ...]:
    """merge_followers(): lanes for each piece of a head, for a full chunk of heads and for the last."""
    full = tensor_core.chunk_heads(case.head_dim, case.group_size)
    last = case.group_size - full * (tensor_core.chunks(case.head_dim, case.group_size) - 1)
    # Deal: a warp's part of the items, and the power of two of lanes that holds it.
    columns = 4 * tensor_core.piece_vectors(case.head_dim, full)
    each = {-(-heads * case.head_dim // columns // config.warps) for heads in (full, last) for config in configs}
    return tuple(sorted({32 // min(32, 1 << (n - 1).bit_length()) for n in each}))


def balanced_orders(lens: list[int], page_size: int, grid: tensor_core.Grid) -> list[Order]:
    """Each request's shares, as `cut_batch` in cut.cuh makes them, walked in tiles by the warps of a block in turn."""
    unit, warps = tensor_core.unit_tokens(page_size), grid.config.warps
    units = [-(-n // unit) for n in lens]
    least = math.ceil(grid.config.min_tiles * warps * tensor_core.TILE / unit)
    total = sum(units)
    per_share = max(least, -(-total // grid.shares))
    orders, begin = [], 0
    for n, count in zip(lens, units, strict=True):
        # Cuts are where a share begins inside the request; the last share ends with the batch.
        inside = range(begin + (total - begin) % per_share, begin + count, per_share)
        cuts = sorted({0, *((cut - begin) * unit for cut in inside), n})
        orders.append(tiled_order([range(a, b) for a, b in pairwise(cuts)], tensor_core.TILE, warps))
        begin += count
    return orders
