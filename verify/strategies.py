"""Hypothesis strategies over the whole space of decode calls. Needs Hypothesis, which nothing else of the harness does."""

from __future__ import annotations

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from cupy_kernels.decode import SCHEDULES
from cupy_kernels.tensor_core import HEAD_DIMS

from .build import POISON, build
from .cases import Case
from .families import FAMILIES

# (dtype, partial_dtype, out_dtype): few, for each is compiled. A float32 output hides no error behind its own rounding.
DTYPES = (
    ("float16", "float32", "float32"), ("bfloat16", "float32", "float32"), ("float32", "float32", "float32"),
    ("float16", "float32", "float16"), ("float16", "float16", "float16"), ("bfloat16", "bfloat16", "bfloat16"),
)  # fmt: skip
# Tokens of a batch and outputs of a call: what keeps an example to some milliseconds.
TOKENS, OUTPUTS = 600, 20_000


@st.composite
def lengths(draw: st.DrawFn, page_size: int, num_splits: int) -> tuple[int, ...]:
    """Up to 5 requests, lengths around pages and around the cut into splits more often than elsewhere."""
    edges = [0, 1, *(n + off for n in (page_size, page_size * num_splits) for off in (-1, 0, 1))]
    length = st.one_of(st.integers(0, 300), st.sampled_from([n for n in edges if n <= TOKENS]))
    return tuple(draw(st.lists(length, min_size=1, max_size=5).filter(lambda lens: sum(lens) <= TOKENS)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any case that `build` takes: lengths, pages, splits, heads, dtypes, layouts, memory, schedules, families, seeds."""
    page_size, num_splits = draw(st.integers(1, 64)), draw(st.integers(1, 12))
    num_kv_heads, group_size = draw(st.integers(1, 4)), draw(st.one_of(st.integers(1, 8), st.sampled_from((16, 17, 32))))
    dtype, partial_dtype, out_dtype = draw(st.sampled_from(DTYPES))
    lens = draw(lengths(page_size, num_splits))
    # As many for tensor cores as not.
    head_dim = draw(st.one_of(st.integers(1, 32).map(lambda n: 8 * n), st.sampled_from(HEAD_DIMS)))
    assume(len(lens) * num_kv_heads * group_size * head_dim <= OUTPUTS)
    # Equal shares leave no partial states that could be stored in another type.
    schedule = draw(st.sampled_from([name for name in SCHEDULES if name != "balanced" or partial_dtype == "float32"]))
    splits: dict[str, Any] = {"num_splits": num_splits if schedule == "uniform" else None}
    if schedule == "fixed":
        splits["pages_per_split"] = num_splits
    case = Case(
        "property", family=draw(st.sampled_from(sorted(FAMILIES))), seed=draw(st.integers(0, 2**16)), context_lens=lens,
        page_size=page_size, num_q_heads=num_kv_heads * group_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype,
        layout=draw(st.sampled_from(("NHD", "HND"))), kernel=draw(st.sampled_from(("auto", "readable"))), schedule=schedule,
        partial_dtype=partial_dtype, out_dtype=out_dtype, sm_scale=draw(st.sampled_from((None, None, 0.3, 1.0))),
        poison=draw(st.sampled_from(sorted(POISON))), pages=draw(st.sampled_from(("shuffled", "reversed", "ordered", "shared"))),
        memory=draw(st.sampled_from(("contiguous", "interleaved", "stacked", "padded"))), **splits,
    )  # fmt: skip
    try:
        build(case)
    except ValueError:
        # Some scores can't be aimed at with so few dimensions or such a scale.
        assume(False)
    return case
