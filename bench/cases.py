"""Cases by name, and the arrays of one: page sets that share a pool, so that no call finds its K and V in the L2 cache."""

from __future__ import annotations

import functools
import math
import random
import zlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from cupy_kernels.problem import NOT_YET, DecodeProblem, check_problem

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
# What stands in a table past a request's last page, in turn.
ABSURD_PAGES = np.array([-1, 2**31 - 1], np.int32)
# Bytes of K and V of all page sets of a case together: four times the L2 of an H200, and more.
COLD_BYTES = 256 << 20
# A graph holds a call for each set: contexts of a few tokens stay in the cache.
MAX_SETS = 1024
CHUNK = 1 << 26


@dataclass(frozen=True)
class BenchCase:
    """One decode call that is timed. ValueError for sizes that do not fit together."""

    name: str
    # tokens of each request
    context_lens: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    # of q, K, V and the output: a key of DTYPES
    dtype: str = "float16"
    # order of the caches' axes: "NHD" or "HND"
    layout: str = "NHD"

    def __post_init__(self) -> None:
        least = min(self.num_q_heads, self.num_kv_heads, self.head_dim, self.page_size, *self.context_lens, self.batch_size)
        if least < 1:
            raise ValueError(f"{self.name}: expected sizes of at least 1, got {least}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"num_q_heads: expected a multiple of {self.num_kv_heads}, got {self.num_q_heads}")
        if self.dtype not in DTYPES or self.layout not in ("NHD", "HND"):
            raise ValueError(f"{self.name}: expected a dtype of {', '.join(DTYPES)} and NHD or HND, got {self}")

    @property
    def batch_size(self) -> int:
        """Requests."""
        return len(self.context_lens)

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each request."""
        return tuple(-(-length // self.page_size) for length in self.context_lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call has to read, from the real lengths."""
        return 2 * sum(self.context_lens) * self.num_kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def outputs(self) -> int:
        """Elements of one call's output."""
        return self.batch_size * self.num_q_heads * self.head_dim

    @property
    def sm_scale(self) -> float:
        """1 / sqrt(head_dim), as the calls default to."""
        return 1 / math.sqrt(self.head_dim)

    def num_sets(self, cold_bytes: int = COLD_BYTES) -> int:
        """Page sets that hold `cold_bytes` together; an even number, for the read floor takes them from K and V in turn."""
        return 2 * min(MAX_SETS // 2, max(1, math.ceil(cold_bytes / self.kv_bytes / 2)))


def ragged_lens(requests: int = 64) -> tuple[int, ...]:
    """lognormal(7, 1.2), clipped to 16 to 16384 tokens; the same lengths everywhere."""
    draw = random.Random(1)
    return tuple(min(16384, max(16, int(draw.lognormvariate(7, 1.2)))) for _ in range(requests))


CASES = {
    case.name: case
    for case in (
        BenchCase("1x1024", (1024,)),
        BenchCase("1x32768", (32768,)),
        BenchCase("8x4096", (4096,) * 8),
        BenchCase("64x1024", (1024,) * 64),
        BenchCase("1x131072", (131072,)),
        BenchCase("64-ragged", ragged_lens()),
        BenchCase("32x8192", (8192,) * 32),
        BenchCase("16x8192-g8", (8192,) * 16, num_q_heads=64),
        BenchCase("8x8192-g16", (8192,) * 8, num_q_heads=128),
        BenchCase("16x2048-mha", (2048,) * 16, num_kv_heads=32),
        BenchCase("16x8192-d64", (8192,) * 16, head_dim=64),
    )
}
# One request each, few programs and many: where splitting pays, where it pays less, where it does not.
SWEEP_CASES = ("1x32768", "8x4096", "64x1024")
CONTEXT_CASES = tuple(BenchCase(f"1x{tokens}", (tokens,)) for tokens in (2**n for n in range(15, 21)))


def select(names: str) -> list[BenchCase]:
    """The cases of a comma-separated list of names, or "all". ValueError for a name that is none."""
    wanted = list(CASES) if names == "all" else [name for name in names.split(",") if name]
    for name in wanted:
        if name not in CASES:
            raise ValueError(f"cases: expected all or some of {', '.join(CASES)}, got {name!r}")
    return [CASES[name] for name in wanted]


@dataclass(frozen=True, eq=False)
class PageSets:
    """The arrays of a case. A call on set i takes `arguments(i)` and writes to `out[i]` and `lse[i]`."""

    case: BenchCase
    xp: ModuleType
    q: Any  # [num_sets, batch_size, num_q_heads, head_dim]
    k_cache: Any
    v_cache: Any
    page_tables: Any  # [num_sets, batch_size, max_pages + 1] int32
    context_lens: Any  # [batch_size] int32
    out: Any  # as q
    lse: Any  # [num_sets, batch_size, num_q_heads] float32
    # exact rows that checks have computed, by set, request and KV head
    known: dict[tuple[int, int, int], Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.page_tables)

    @property
    def pools(self) -> tuple[Any, Any]:
        """Both caches."""
        return self.k_cache, self.v_cache

    def arguments(self, i: int) -> tuple[Any, Any, Any, Any, Any]:
        """q, k_cache, v_cache, page_table, context_lens of set i."""
        return self.q[i], self.k_cache, self.v_cache, self.page_tables[i], self.context_lens

    def problem(self, i: int) -> DecodeProblem:
        """The checked call on set i."""
        return check_problem(
            *self.arguments(i), sm_scale=None, layout=self.case.layout, lse_base="e", check_values=False, not_yet=NOT_YET
        )


def build(case: BenchCase, xp: ModuleType, seed: int, cold_bytes: int = COLD_BYTES) -> PageSets:
    """Normal random q, K and V; the pages of all sets permuted over one pool; NaN in every page and slot that no set names."""
    key = np.random.SeedSequence((seed, zlib.crc32(case.name.encode())))
    page_key, *array_keys = key.spawn(4)
    num_sets, used = case.num_sets(cold_bytes), sum(case.pages)
    pool_pages = num_sets * used + max(3, num_sets * used // 64)
    ids = np.random.default_rng(page_key).permutation(pool_pages).astype(np.int32)
    # One column more than the longest request needs.
    tables = np.resize(ABSURD_PAGES, (num_sets, case.batch_size, max(case.pages) + 1)).astype(np.int32)
    ends = np.cumsum(case.pages)
    for i in range(num_sets):
        for b, (end, pages) in enumerate(zip(ends, case.pages, strict=True)):
            tables[i, b, :pages] = ids[i * used + end - pages : i * used + end]

    dtype, nan = DTYPES[case.dtype], float("nan")
    axes = (case.page_size, case.num_kv_heads) if case.layout == "NHD" else (case.num_kv_heads, case.page_size)
    q_shape = (num_sets, case.batch_size, case.num_q_heads, case.head_dim)
    shapes = [q_shape, *[(pool_pages, *axes, case.head_dim)] * 2]
    q, k_cache, v_cache = (
        normal(xp, shape, dtype, int(one.generate_state(1)[0])) for shape, one in zip(shapes, array_keys, strict=True)
    )
    unused = xp.asarray(ids[num_sets * used :])
    for cache in (k_cache, v_cache):
        cache[unused] = nan
        for b, (length, pages) in enumerate(zip(case.context_lens, case.pages, strict=True)):
            if slots := length % case.page_size:
                last = xp.asarray(tables[:, b, pages - 1])
                nhd = cache if case.layout == "NHD" else cache.swapaxes(1, 2)
                nhd[last, slots:] = nan
    return PageSets(
        case, xp, q, k_cache, v_cache, xp.asarray(tables), xp.asarray(np.array(case.context_lens, np.int32)),
        out=xp.full(q_shape, nan, dtype), lse=xp.full(q_shape[:-1], nan, np.float32),
    )  # fmt: skip


def normal(xp: ModuleType, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> Any:
    """Standard normal numbers, rounded to dtype. On the GPU from a counter: gigabytes in a moment, and no library needed."""
    array = xp.empty(shape, dtype)
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        if xp is np:
            part[...] = np.random.default_rng((seed, start)).standard_normal(part.size, np.float32)
        else:
            part[...] = _normal_kernel()(np.uint64(((seed << 32) + start) % 2**64), xp.empty(part.size, np.float32))
    return array


@functools.cache
def _normal_kernel() -> Any:
    """Box and Muller on two 32-bit halves of a 64-bit mix (splitmix64's) of seed and index."""
    import cupy

    return cupy.ElementwiseKernel(
        "uint64 seed",
        "float32 z",
        """
        unsigned long long x = (seed + (unsigned long long)i) * 0x9E3779B97F4A7C15ull;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
        x ^= x >> 31;
        // In (0, 1]: the logarithm stays finite.
        float u = ((float)(unsigned)(x >> 40) + 1.0f) * 5.9604645e-8f;
        float turn = (float)(unsigned)(x & 0xffffffu) * 5.9604645e-8f;
        z = sqrtf(-2.0f * logf(u)) * cospif(2.0f * turn);
        """,
        "bench_normal",
    )
