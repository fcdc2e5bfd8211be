"""The arrays of one decode call, and the harness's own walk through its pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arithmetic import token_splits


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call of paged decode attention, NumPy arrays; bf16 is `ml_dtypes.bfloat16`."""

    # [batch_size, num_q_heads, head_dim]
    q: np.ndarray
    # [pool_pages, page_size, num_kv_heads, head_dim] (NHD) or [pool_pages, num_kv_heads, page_size, head_dim] (HND)
    k_cache: np.ndarray
    v_cache: np.ndarray
    # [batch_size, max_pages] int32; entries past a request's last page are anything
    page_table: np.ndarray
    # [batch_size] int32
    context_lens: np.ndarray
    sm_scale: float
    layout: str = "NHD"
    # the output that exact arithmetic gives and the kernel must give bit for bit, [batch_size, num_q_heads,
    # head_dim] float64; NaN where nothing exact is claimed; None: nowhere
    exact: np.ndarray | None = None
    # whether `exact` holds for 16-bit outputs only
    exact_in_16_bits_only: bool = False

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k_cache.shape[1 if self.layout == "NHD" else 2]

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return self.k_cache.shape[2 if self.layout == "NHD" else 1]

    def head(self, b: int, kv_head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q `[group_size, D]`, k and v `[context_len, D]` of one request and KV head, in their own dtypes."""
        length = int(self.context_lens[b])
        pages = self.page_table[b, : -(-length // self.page_size)]
        group_size = self.q.shape[1] // self.num_kv_heads
        q = self.q[b, kv_head * group_size : (kv_head + 1) * group_size]
        axis = 2 if self.layout == "NHD" else 1
        rows = [np.take(cache, kv_head, axis)[pages] for cache in (self.k_cache, self.v_cache)]
        k, v = (x.reshape(-1, x.shape[-1])[:length] for x in rows)
        return q, k, v

    def splits(self, b: int, *, num_splits: int | None = 1, pages_per_split: int | None = None) -> list[range]:
        """Tokens of each split of request b, by `num_splits` or, if given, `pages_per_split`."""
        length = int(self.context_lens[b])
        return token_splits(length, self.page_size, num_splits=num_splits or 1, pages_per_split=pages_per_split)

    def call(self) -> dict[str, Any]:
        """The arguments that `paged_decode` of the reference and of the kernels have in common, by name."""
        names = ("q", "k_cache", "v_cache", "page_table", "context_lens", "sm_scale", "layout")
        return {name: getattr(self, name) for name in names}


def default_scale(head_dim: int, sm_scale: float | None = None) -> float:
    """`sm_scale`, or `1 / sqrt(head_dim)` if it is None."""
    return 1 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
