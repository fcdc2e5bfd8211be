"""`assert_attention`: the comparator for anyone's test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import reference

from .arithmetic import Arithmetic, Order
from .budget import Budget, decode_budget, default_orders, partial_budget
from .inputs import Inputs, default_scale
from .tiers import compare
from .verdict import TIERS, Report

# An empty or non-finite mistake shows in these whatever was asked for.
ALWAYS = ("T1", "T5", "T7")


def assert_attention(
    out: Any,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    context_lens: Any,
    *,
    lse: Any = None,
    partial: tuple[Any, Any] | None = None,
    sm_scale: float | None = None,
    layout: str = "NHD",
    tier: str | Sequence[str] = "T1",
    arithmetic: Arithmetic | None = None,
    orders: Sequence[Order] | None = None,
    num_splits: int | None = None,
    pages_per_split: int | None = None,
    family: str | None = None,
    lse_base: str = "e",
) -> Report:
    """Check the output of any paged decode kernel; returns the report, or raises AssertionError with its text.

    Arrays are NumPy's, CuPy's or anything `numpy.from_dlpack` takes; bf16 is `ml_dtypes.bfloat16`.

    Args:
        out: `[batch_size, num_q_heads, head_dim]`, float16, bfloat16 or float32.
        q, k_cache, v_cache, page_table, context_lens, sm_scale, layout: the inputs of the call: `[batch_size,
            num_q_heads, head_dim]`; `[pool_pages, page_size, num_kv_heads, head_dim]` ("NHD") or `[pool_pages,
            num_kv_heads, page_size, head_dim]` ("HND"); `[batch_size, max_pages]` and `[batch_size]` integers;
            None is `1 / sqrt(head_dim)`.
        lse: `[batch_size, num_q_heads]` float32 in base `lse_base` ("e" or "2").
        partial: `(o [batch_size, num_q_heads, num_splits, head_dim], lse [batch_size, num_q_heads, num_splits])`
            of the splits; needs `num_splits`, `pages_per_split` or `orders`.
        tier: names of TIERS, T0 to T7. T1 (the error bound) and T7 (non-finite elements), and T5 for a given
            lse, are checked in any case.
        arithmetic: what the kernel does to its numbers; None assumes the least accurate kernel in use: tensor
            cores and P in the input's dtype for 16-bit inputs.
        orders, num_splits, pages_per_split: in what order tokens are taken and how they are split; None of them:
            one split a page.
        family: "normal" says that q, k, v are standard normal, for T4.

    Raises:
        AssertionError: a tier fails. TypeError, ValueError: as `reference.paged_decode`, an unknown tier, an
            output of the wrong shape or dtype.
    """
    tiers = (tier,) if isinstance(tier, str) else tuple(tier)
    if unknown := set(tiers) - set(TIERS) | set(tiers) & {"T0b", "T8", "T9"}:
        raise ValueError(f"tier: expected names among T0, T1 ... T7, got {sorted(unknown)}")
    out, q, k_cache, v_cache = map(to_numpy, (out, q, k_cache, v_cache))
    page_table, context_lens = to_numpy(page_table), to_numpy(context_lens)
    inputs = Inputs(q, k_cache, v_cache, page_table, context_lens, default_scale(q.shape[-1], sm_scale), layout)
    want = reference.paged_decode(**inputs.call())
    arithmetic = arithmetic or Arithmetic.conservative(inputs.q.dtype.name)
    arithmetic = replace(arithmetic, out_dtype=out.dtype.name)
    if partial is not None:
        arithmetic = replace(arithmetic, partial_dtype=to_numpy(partial[0]).dtype.name)
    if orders is None:
        if num_splits is None and pages_per_split is None:
            pages_per_split = 1
        orders = default_orders(inputs, arithmetic, num_splits=num_splits, pages_per_split=pages_per_split)
    budget = decode_budget(inputs, arithmetic, orders)
    same_pages(budget, want)
    states = None
    if partial is not None:
        o_part, lse_part = map(to_numpy, partial)
        states = o_part, lse_part, partial_budget(inputs, arithmetic, orders)
    lse = None if lse is None else to_numpy(lse)
    report = compare(
        out, lse, budget, arithmetic,
        inputs=inputs, family=family, reference=want, partial=states, lse_base=lse_base,
    )  # fmt: skip
    kept = {name: v for name, v in report.verdicts.items() if name in (*tiers, *ALWAYS) or name == "T6"}
    report = replace(report, verdicts=kept)
    if not report.passed:
        raise AssertionError(f"attention is wrong:\n{report}")
    return report


def same_pages(budget: Budget, want: tuple[np.ndarray, np.ndarray]) -> None:
    """RuntimeError unless the harness's page walk gives the reference's result: two views of one input."""
    with np.errstate(invalid="ignore"):
        # Both are float64 sums: 1e-12 is 4500 of its roundoffs, for sums of up to a few 10k terms.
        off = np.abs(budget.out - want[0]) > 1e-12 * budget.magnitude * (1 + np.abs(want[1][..., None]))
    if off[np.isfinite(want[0])].any():
        raise RuntimeError("the reference and the error budget disagree about the exact result")


def to_numpy(x: Any) -> np.ndarray:
    """A host copy: NumPy as it is, CuPy by `get()`, others by DLPack."""
    if isinstance(x, np.ndarray):
        return x
    return np.asarray(x.get()) if hasattr(x, "get") else np.from_dlpack(x)
