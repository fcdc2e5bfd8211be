"""Paged split-KV decode attention and the exact merge of attention states, as CUDA C for CuPy and NumPy arrays."""

from .decode import paged_decode, split_decode
from .decode_plan import DecodePlan
from .merge import merge_state, merge_state_in_place, merge_states
from .plan import plan_splits, split_ranges

__all__ = [
    "DecodePlan",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "paged_decode",
    "plan_splits",
    "split_decode",
    "split_ranges",
]
