"""The definition of paged decode attention and of its merge, in NumPy and, in `reference.exact`, in mpmath.

`dense` is the float64 oracle, `split` the same cut into partial states in a stated precision per stage,
`exact` the same to 60 digits. Nothing here imports the product or the harness, and pages are gathered in a
way of its own.
"""

from __future__ import annotations

from .dense import attend, gather, paged_decode, scores, visible_range
from .split import Precision, merge, merge_pair, partial, split_ranges

__all__ = [
    "Precision",
    "attend",
    "gather",
    "merge",
    "merge_pair",
    "paged_decode",
    "partial",
    "scores",
    "split_ranges",
    "visible_range",
]
