"""The tensor-core kernels, balanced.cu and partial_mma.cu: which calls they take, their constants, workspace and launches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from . import jit
from .arrays import data_pointer, element_strides
from .problem import MAX_GRID_YZ, DecodeProblem

DTYPES = ("float16", "bfloat16")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
TILE = 16
N_TILE = 8  # query heads of one MMA
# A word of a mailbox that was not written to: of kernels/balanced.cu.
NOT_THERE = 0xFFFFFFFF
# Tiles of each warp in a share, from which on it is paced, by N tiles of a block: see kernels/pace.cuh.
PACED_ROWS = {1: 60, 2: 30}
# Of the words that blocks count in: PACED_WORDS and PACED_STRIDE there.
PROGRESS_SHAPE = (8, 32)
# Counts of units are int32 on the device; shares round up.
MAX_UNITS = 2**30


@dataclass(frozen=True)
class Config:
    """How a block is made. It decides speed and the bits, not the result."""

    warps: int = 8
    blocks_per_sm: int = 1
    min_tiles: int = 1  # of 16 tokens, for each warp: below that a batch is cut into fewer shares


def max_chunk_heads(head_dim: int) -> int:
    """Query heads of one KV head that a block takes: what the registers hold."""
    return 2 * N_TILE if head_dim <= 128 else N_TILE


def default_config(head_dim: int, group_size: int, requests_per_share: float = 0.0) -> Config:
    """The configuration that was fastest where it was measured (bench/NOTES.md)."""
    heads = chunk_heads(head_dim, group_size)
    if head_dim <= 64:
        return Config(16 if heads <= N_TILE else 8)
    # Of two blocks on an SM one streams while the other merges. But they are more blocks: more pieces of long requests.
    enough = 0.5 if heads <= N_TILE // 2 else 2
    return Config(4, 2) if requests_per_share >= enough and heads <= N_TILE and head_dim <= 128 else Config(8)


def chunks(head_dim: int, group_size: int) -> int:
    """Blocks that share the query heads of one KV head."""
    return math.ceil(group_size / max_chunk_heads(head_dim))


def chunk_heads(head_dim: int, group_size: int) -> int:
    """Query heads of the largest chunk; all are as even as they can be."""
    return math.ceil(group_size / chunks(head_dim, group_size))


def piece_vectors(head_dim: int, block_heads: int) -> int:
    """Vectors of 4 columns in what blocks hand to each other at a time: PIECE_VECTORS of kernels/pieces.cuh."""
    return 2 if block_heads > N_TILE or head_dim > 128 else 1


def p_parts(dtype: str, out_dtype: str) -> int:
    """16-bit numbers that hold one p: two float16 hold 22 bits, two bfloat16 16 bits, three 24."""
    return 3 if dtype == "bfloat16" and out_dtype == "float32" else 2


def constants(dtype: str, out_dtype: str, head_dim: int, group_size: int, page_size: int, config: Config) -> dict[str, Any]:
    """The `-D` constants of kernels/balanced.cu."""
    return {
        "KV": dtype, "OUT": out_dtype, "HEAD_DIM": head_dim, "N_TILES": math.ceil(chunk_heads(head_dim, group_size) / N_TILE),
        "P_PARTS": p_parts(dtype, out_dtype), "WHOLE_TILES": int(page_size % TILE == 0), "WARPS": config.warps,
        "BLOCKS_PER_SM": config.blocks_per_sm,
    }  # fmt: skip


def specialisations() -> Iterator[dict[str, Any]]:
    """The constants of every kernel that `default_config` can ask for, one page size of each kind."""
    for head_dim in HEAD_DIMS:
        for group_size in (1, 16) if max_chunk_heads(head_dim) > N_TILE else (1,):
            for config in {default_config(head_dim, group_size, requests) for requests in (0, math.inf)}:
                for dtype in DTYPES:
                    for out_dtype in (dtype, "float32"):
                        for page_size in (1, TILE):
                            yield constants(dtype, out_dtype, head_dim, group_size, page_size, config)


def unit_tokens(page_size: int) -> int:
    """Shares are cut in these: the least multiple of a page that fills a tile."""
    return math.ceil(TILE / page_size) * page_size


def refusal(problem: DecodeProblem) -> str | None:
    """Why the tensor-core kernels can't take this call, or None if it can. Nothing is read from the device."""
    p = problem
    if p.dtype not in DTYPES:
        return f"float16 or bfloat16, got {p.dtype}"
    if p.head_dim not in HEAD_DIMS:
        return f"a head_dim of {', '.join(map(str, HEAD_DIMS))}, got {p.head_dim}"
    if p.window is not None:
        return "no window"
    for name, array in (("q", p.q), ("k_cache", p.k_cache), ("v_cache", p.v_cache)):
        strides = element_strides(array)
        # A row that is never followed by another may lie anywhere.
        used = [stride for stride, size in zip(strides[:-1], array.shape[:-1], strict=True) if size > 1]
        if data_pointer(array) % 16 or any(stride % 8 for stride in used):
            return f"rows of {name} aligned to 16 bytes"
        if array is not p.q and strides[1] * p.page_size >= 2**31:
            return f"a page of {name} to span less than 2^31 elements"
    if p.k_cache.shape[0] == 0:
        # A block that goes by tables out of date loads a page before it knows.
        return "a pool of at least one page"
    if p.num_kv_heads * chunks(p.head_dim, p.group_size) > MAX_GRID_YZ:
        return f"at most {MAX_GRID_YZ} chunks of query heads"
    if p.batch_size * math.ceil(p.max_pages * p.page_size / unit_tokens(p.page_size)) > MAX_UNITS:
        return f"at most {MAX_UNITS} tiles of table"
    return None


@dataclass(frozen=True)
class Grid:
    """The fixed grid of a launch, and the workspace it needs."""

    config: Config
    shares: int  # equal parts of all tokens
    head_chunks: int  # of the query heads of one KV head
    num_kv_heads: int
    block_heads: int  # query heads of a block
    head_dim: int

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.head_chunks, self.num_kv_heads, self.shares

    @property
    def columns(self) -> int:
        """Blocks of one share."""
        return self.head_chunks * self.num_kv_heads

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: `Exchange` of kernels/stream.cuh."""
        warps, heads, chunks_16 = self.config.warps, self.block_heads, self.head_dim // 8
        # Rows of K, and of V where both are there together, in chunks of 16 bytes: padded to 4 modulo 8, and by 1.
        slot = 16 * TILE * ((chunks_16 + 3) // 8 * 8 + 4 + (chunks_16 + 1 if self.head_dim <= 128 else 0))
        areas = warps * max(slot, 16 * heads * (self.head_dim // 4 + 1))
        q = 2 * 2 * N_TILE * math.ceil(heads / N_TILE) * ((self.head_dim + 31) // 64 * 64 + 32)
        return areas + q + 8 * warps * heads


def plan_grid(
    *, batch_size: int, num_kv_heads: int, group_size: int, head_dim: int, num_sms: int, config: Config | None = None
) -> Grid:
    """As many blocks as the device holds at once, in whole shares. It does not depend on the lengths."""
    head_chunks = chunks(head_dim, group_size)
    columns = head_chunks * num_kv_heads
    config = config or default_config(head_dim, group_size, batch_size / max(1, num_sms // columns))
    shares = min(MAX_GRID_YZ, max(1, num_sms * config.blocks_per_sm // columns))
    return Grid(config, shares, head_chunks, num_kv_heads, chunk_heads(head_dim, group_size), head_dim)


@dataclass(frozen=True, eq=False)
class Workspace:
    """What the blocks of a launch leave for each other. Launches that may overlap need one each.

    All words of the pieces are NOT_THERE before each launch and after it.
    """

    o_pieces: Any  # [shares, columns, block_heads, head_dim] float32
    sum_pieces: Any  # [shares, columns, block_heads, head_dim / 4 / piece_vectors(), 2] float32
    progress: Any  # PROGRESS_SHAPE uint32, whatever it holds

    @classmethod
    def of(cls, xp: ModuleType, grid: Grid) -> Workspace:
        """A new one, on the current device."""
        rows = (grid.shares, grid.columns, grid.block_heads)
        pieces = grid.head_dim // 4 // piece_vectors(grid.head_dim, grid.block_heads)
        shapes = (*rows, grid.head_dim), (*rows, pieces, 2)
        o_pieces, sum_pieces = (xp.full(shape, NOT_THERE, np.uint32).view(np.float32) for shape in shapes)
        return cls(o_pieces, sum_pieces, xp.zeros(PROGRESS_SHAPE, np.uint32))


def divider(divisor: int) -> int:
    """What a kernel's `Divider` needs to divide numbers below 2^31 by a divisor from 1 to 2^31 - 1.

    With the least 2^shift >= divisor: floor(n / divisor) = floor((floor(n m / 2^32) + n) / 2^shift) for
    m = floor(2^32 (2^shift - divisor) / divisor) + 1; Granlund & Montgomery 1994.
    """
    shift = (divisor - 1).bit_length()
    return shift << 32 | ((1 << 32) * ((1 << shift) - divisor) // divisor + 1)


def bind_balanced(problem: DecodeProblem, out: Any, lse: Any, grid: Grid, workspace: Workspace) -> jit.Launch:
    """One launch: out [batch_size, num_q_heads, head_dim] and lse [batch_size, num_q_heads] by their strides.

    The problem is one that `refusal` does not refuse, the grid is planned for its sizes.
    """
    p, unit = problem, unit_tokens(problem.page_size)
    values = constants(p.dtype, str(out.dtype), p.head_dim, p.group_size, p.page_size, grid.config)
    units = lambda rows: math.ceil(rows * grid.config.warps * TILE / unit)
    return jit.kernel("balanced.cu", "balanced", **values).bind(
        p.xp, grid.dims, 32 * grid.config.warps, grid.shared_bytes, **p.arguments(out, lse, "batch", "head"),
        o_pieces=workspace.o_pieces, sum_pieces=workspace.sum_pieces, progress=workspace.progress, batch_size=p.batch_size,
        chunk_heads=chunk_heads(p.head_dim, p.group_size), page_divider=divider(p.page_size), unit_divider=divider(unit),
        share_divider=divider(grid.shares), unit_tokens=unit, pool_pages=int(p.k_cache.shape[0]),
        min_units=units(grid.config.min_tiles), paced_units=units(PACED_ROWS[values["N_TILES"]]),
        scale_log2=nonzero(p.scale_log2),
    )  # fmt: skip


def bind_partial(problem: DecodeProblem, out_dtype: str, num_splits: int, grid: Grid, arguments: dict[str, Any]) -> jit.Launch:
    """Pass 1 of the two-launch schedules on tensor cores; `arguments` are those it shares with kernels/partial.cu."""
    p = problem
    values = constants(p.dtype, out_dtype, p.head_dim, p.group_size, p.page_size, grid.config)
    return jit.kernel("partial_mma.cu", "partial_mma", **values).bind(
        p.xp, (p.batch_size, p.num_kv_heads * grid.head_chunks, num_splits), 32 * grid.config.warps, grid.shared_bytes,
        **arguments, page_divider=divider(p.page_size), head_chunks=grid.head_chunks,
        chunk_heads=chunk_heads(p.head_dim, p.group_size), scale_log2=nonzero(p.scale_log2),
    )  # fmt: skip


def nonzero(scale_log2: float) -> float:
    """All scores alike: a scale of 0 would make 0 * -inf of an empty maximum."""
    return scale_log2 if abs(scale_log2) > 1e-30 else 1e-30
