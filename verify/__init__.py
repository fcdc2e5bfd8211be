"""The harness: how wrong a decode kernel is, and why.

`cases` and `families` make inputs, `budget` bounds the error of every output element by source for a kernel that an
`Arithmetic` describes, `tiers` compares, `ratchet` remembers. `assert_attention` is all of it for anyone's pytest.
"""

from __future__ import annotations

from .arithmetic import Arithmetic, tiled_order, token_splits
from .assertion import assert_attention
from .budget import SOURCES, Budget, decode_budget, default_orders, head_budget, merge_budget, partial_budget, predict_rho
from .cases import Case, build
from .families import FAMILIES
from .inputs import Inputs
from .tiers import bitwise, compare
from .verdict import TIERS, Report, Verdict

__all__ = [
    "FAMILIES",
    "SOURCES",
    "TIERS",
    "Arithmetic",
    "Budget",
    "Case",
    "Inputs",
    "Report",
    "Verdict",
    "assert_attention",
    "bitwise",
    "build",
    "compare",
    "decode_budget",
    "default_orders",
    "head_budget",
    "merge_budget",
    "partial_budget",
    "predict_rho",
    "tiled_order",
    "token_splits",
]
