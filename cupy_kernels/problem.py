"""DecodeProblem: the sizes of one decode call, read off its arrays once, and every check of its arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .arrays import FLOAT_DTYPES, array_module, as_array, check_array, check_choice, check_output, check_unit_stride, strides

LAYOUTS = ("NHD", "HND")
LSE_BASES = ("e", "2")
MAX_HEAD_DIM = 256
MAX_HEADS_PER_BLOCK = 16
# Blocks of a grid along y and along z: heads and splits.
MAX_GRID_YZ = 65535
# Where a call has to be refused until its feature exists: argument -> its default.
NOT_YET = {
    "window": None, "softcap": None, "sinks": None, "alibi_slopes": None, "k_scale": 1.0, "v_scale": 1.0, "kv_dtype": None,
}  # fmt: skip


@dataclass(frozen=True)
class DecodeProblem:
    """One decode call, checked. Caches are held as NHD views, `[pool_pages, page_size, num_kv_heads, head_dim]`."""

    xp: ModuleType
    q: Any  # [batch_size, num_q_heads, head_dim]
    k_cache: Any
    v_cache: Any
    page_table: Any  # [batch_size, max_pages] int32
    context_lens: Any  # [batch_size] int32
    sm_scale: float
    lse_base: str
    # The kernels know windows; the public calls take them once every schedule does.
    window: int | None = None

    @property
    def batch_size(self) -> int:
        return int(self.q.shape[0])

    @property
    def num_q_heads(self) -> int:
        return int(self.q.shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[2])

    @property
    def dtype(self) -> str:
        return str(self.q.dtype)

    @property
    def page_size(self) -> int:
        return int(self.k_cache.shape[1])

    @property
    def num_kv_heads(self) -> int:
        return int(self.k_cache.shape[2])

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def head_chunks(self) -> int:
        """Blocks that share the query heads of one KV head."""
        return math.ceil(self.group_size / MAX_HEADS_PER_BLOCK)

    @property
    def max_pages(self) -> int:
        return int(self.page_table.shape[1])

    @property
    def scale_log2(self) -> float:
        """sm_scale * log2(e), rounded once: scores inside kernels are base-2 logarithms."""
        return self.sm_scale * math.log2(math.e)

    def arguments(self, o: Any, lse: Any, *row_axes: str) -> dict[str, Any]:
        """What every decode kernel is told of the call, by its parameters' names; `row_axes` are those of o before head_dim."""
        return {
            "q": self.q, "k_cache": self.k_cache, "v_cache": self.v_cache, "page_table": self.page_table,
            "context_lens": self.context_lens, "o": o, "lse": lse, "group_size": self.group_size, "page_size": self.page_size,
            "max_pages": self.max_pages, "natural": int(self.lse_base == "e"), **strides("q", self.q, "batch", "head"),
            **strides("k", self.k_cache, "page", "slot", "head"), **strides("v", self.v_cache, "page", "slot", "head"),
            **strides("page_table", self.page_table, ""), **strides("context_lens", self.context_lens, ""),
            **strides("o", o, *row_axes), **strides("lse", lse, *row_axes),
        }  # fmt: skip

    def output(self, name: str, array: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """The caller's output array, checked, or a new one."""
        if array is None:
            return self.xp.empty(shape, np.dtype(dtype))
        array = as_array(name, array)
        check_array(name, array, self.q, (dtype,), shape)
        check_output(name, array)
        return array


def check_problem(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, context_lens: Any, *, sm_scale: float | None, layout: str,
    lse_base: str, check_values: bool, not_yet: dict[str, Any],
) -> DecodeProblem:  # fmt: skip
    """Every check that needs no schedule. See `paged_decode` for what each argument is.

    Raises:
        TypeError: kind or dtype of an argument.
        ValueError: shape, layout, stride or range of an argument.
        NotImplementedError: an option of `NOT_YET` with a value other than its default.
    """
    for name, value in not_yet.items():
        default = NOT_YET[name]
        if value is not default and not (isinstance(value, (int, float)) and value == default):
            raise NotImplementedError(f"{name}: expected {default!r}, got a value; this option is not there yet")
    check_choice("layout", layout, LAYOUTS)
    check_choice("lse_base", lse_base, LSE_BASES)

    q = as_array("q", q)
    check_array("q", q, q, FLOAT_DTYPES, ("batch_size", "num_q_heads", "head_dim"))
    batch_size, num_q_heads, head_dim = q.shape
    dtype = (str(q.dtype),)
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim: expected a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {head_dim}")
    if num_q_heads == 0:
        raise ValueError("num_q_heads: expected at least 1, got 0")
    check_unit_stride("q", q)

    caches = {}
    axes = ("page_size", "num_kv_heads") if layout == "NHD" else ("num_kv_heads", "page_size")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        cache = as_array(name, cache)
        check_array(name, cache, q, dtype, ("pool_pages", *axes, head_dim))
        check_unit_stride(name, cache)
        caches[name] = cache if layout == "NHD" else cache.swapaxes(1, 2)
    k_cache, v_cache = caches["k_cache"], caches["v_cache"]
    if k_cache.shape != v_cache.shape:
        raise ValueError(f"v_cache: expected the shape of k_cache, {list(k_cache.shape)}, got {list(v_cache.shape)} (as NHD)")
    page_size, num_kv_heads = k_cache.shape[1:3]
    if page_size == 0:
        raise ValueError("page_size: expected at least 1, got 0")
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_q_heads}")

    page_table, context_lens = as_array("page_table", page_table), as_array("context_lens", context_lens)
    check_array("page_table", page_table, q, ("int32",), (batch_size, "max_pages"))
    check_unit_stride("page_table", page_table)
    check_array("context_lens", context_lens, q, ("int32",), (batch_size,))

    if sm_scale is None:
        sm_scale = 1 / math.sqrt(head_dim)
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float, np.integer, np.floating)):
        raise TypeError(f"sm_scale: expected a number, got {type(sm_scale).__name__}")
    if not math.isfinite(sm_scale):
        raise ValueError(f"sm_scale: expected a finite number, got {sm_scale}")
    problem = DecodeProblem(array_module(q), q, k_cache, v_cache, page_table, context_lens, float(sm_scale), lse_base)
    if problem.num_kv_heads * problem.head_chunks > MAX_GRID_YZ:
        raise ValueError(f"num_kv_heads: expected at most {MAX_GRID_YZ // problem.head_chunks}, got {num_kv_heads}")
    if check_values:
        _check_values(problem)
    return problem


def _check_values(problem: DecodeProblem) -> None:
    """Reads lengths and page ids from the device: waits for it, and copies the table."""
    on_host = np.asarray if problem.xp is np else problem.xp.asnumpy
    lengths, table = on_host(problem.context_lens), on_host(problem.page_table)
    limit = problem.max_pages * problem.page_size
    for request in np.flatnonzero((lengths < 0) | (lengths > limit)):
        raise ValueError(f"context_lens[{request}]: expected 0 to {limit} (table width x page_size), got {lengths[request]}")
    used = np.arange(problem.max_pages) < -(-lengths[:, None].astype(np.int64) // problem.page_size)
    pool_pages = problem.k_cache.shape[0]
    for request, page in np.argwhere(used & ((table < 0) | (table >= pool_pages))):
        raise ValueError(f"page_table[{request}, {page}]: expected 0 to {pool_pages - 1}, got {table[request, page]}")
