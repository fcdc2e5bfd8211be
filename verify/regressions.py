"""The worst that searches with `verify.strategies` have found, frozen: the cases whose errors came closest to their bounds."""

from __future__ import annotations

from dataclasses import dataclass

from .cases import Case


@dataclass(frozen=True)
class Regression:
    """A case, and the largest ratio of error to bound that the CPU stand-in had in one tier."""

    case: Case
    tier: str
    ratio: float


REGRESSIONS = (
    # One tile of few tokens and a long dot product: nothing averages out.
    Regression(
        Case("worst-dot", family="heavy_tail", seed=24, context_lens=(4,), page_size=4, num_q_heads=64, num_kv_heads=4,
             head_dim=184, num_splits=1, out_dtype="float32", sm_scale=0.3, poison="inf", pages="reversed"),
        "T1", 0.4535,
    ),
    Regression(
        Case("worst-dot-bf16", family="cancel", seed=1308, context_lens=(3, 2), page_size=63, num_q_heads=48, num_kv_heads=3,
             head_dim=136, dtype="bfloat16", schedule="fixed", num_splits=None, pages_per_split=3, out_dtype="float32",
             poison="inf"),
        "T1", 0.4094,
    ),
    # The same on tensor cores, with P in two bfloat16.
    Regression(
        Case("worst-tensor", family="subnormal_p", seed=334, context_lens=(10, 0, 79), page_size=15, num_q_heads=6,
             num_kv_heads=3, head_dim=80, dtype="bfloat16", num_splits=1, out_dtype="float32", poison="inf"),
        "T1", 0.2625,
    ),
    Regression(
        Case("worst-shares", family="cancel", context_lens=(10, 0, 79), page_size=15, num_q_heads=6, num_kv_heads=3,
             head_dim=128, dtype="bfloat16", schedule="balanced", num_splits=None, out_dtype="float32", poison="inf"),
        "T1", 0.2088,
    ),
    # Few dimensions and most weights next to nothing: what is left is one rounding or two.
    Regression(
        Case("worst-fp32", family="subnormal_p", seed=56, context_lens=(86, 86), page_size=63, num_q_heads=17, num_kv_heads=1,
             head_dim=16, dtype="float32", num_splits=1, out_dtype="float32", poison="inf", memory="interleaved"),
        "T1", 0.3576,
    ),
    Regression(
        Case("worst-lse", family="subnormal_p", seed=57, context_lens=(96, 57, 86, 56), page_size=23, num_q_heads=51,
             num_kv_heads=3, head_dim=8, dtype="float32", num_splits=1, out_dtype="float32", poison="inf", memory="interleaved"),
        "T5", 0.4496,
    ),
    # A score of 60 from 24 products.
    Regression(
        Case("worst-lse-fp16", family="needle_page", seed=29743, context_lens=(50, 0, 125), page_size=49, num_q_heads=18,
             num_kv_heads=3, head_dim=24, schedule="fixed", num_splits=None, pages_per_split=11, poison="large"),
        "T5", 0.3032,
    ),
    # Rounding of a stored partial o, where nothing else is of any size: half an ulp, nearly.
    Regression(
        Case("worst-partial", family="cancel", context_lens=(276, 78, 128, 9, 0), page_size=9, num_q_heads=9, num_kv_heads=3,
             head_dim=8, schedule="fixed", num_splits=None, pages_per_split=7, partial_dtype="float16", poison="large",
             memory="interleaved"),
        "T6", 0.9959,
    ),
)  # fmt: skip
