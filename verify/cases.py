"""Cases: what is run through reference and kernels, in named lists."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from . import family_list  # noqa: F401  registers the families
from .arithmetic import DTYPES, Arithmetic
from .build import POISON, build
from .families import FAMILIES

__all__ = ["LISTS", "Case", "build", "edge", "smoke", "sweep"]

FINITE = [name for name, family in FAMILIES.items() if not family.nonfinite]
NON_FINITE = [name for name, family in FAMILIES.items() if family.nonfinite]


@dataclass(frozen=True, repr=False)
class Case:
    """One decode call. `build(case)` gives its arrays; the repr gives the case. ValueError for an unknown word."""

    name: str
    # key of FAMILIES: what q, K and V hold
    family: str = "normal"
    seed: int = 0
    # tokens per request; 0 is a request that sees nothing
    context_lens: tuple[int, ...] = (100,)
    page_size: int = 16
    num_q_heads: int = 4
    # divides num_q_heads
    num_kv_heads: int = 2
    head_dim: int = 64
    # of q, K and V: "float16", "bfloat16", "float32"
    dtype: str = "float16"
    # order of the axes of the cache: "NHD" or "HND"
    layout: str = "NHD"
    # "uniform": num_splits per request; "fixed": pages_per_split; or "balanced"
    schedule: str = "uniform"
    num_splits: int | None = 4
    pages_per_split: int | None = None
    # stored partial o
    partial_dtype: str = "float32"
    # stored output; None: as dtype
    out_dtype: str | None = None
    # None: 1 / sqrt(head_dim)
    sm_scale: float | None = None
    # what fills everything that must not be read: a key of POISON
    poison: str = "nan"
    # pages of a request in the pool: "shuffled", "reversed", "ordered", or "shared": as shuffled, and requests have
    # the first half of request 0's pages in common
    pages: str = "shuffled"
    # memory of K and V: "contiguous"; "interleaved" [..., 2, head_dim]; "stacked" [pages, 2, ...]; "padded": slices of
    # longer rows, K and V of different strides, and q a slice too
    memory: str = "contiguous"

    def __post_init__(self) -> None:
        words = {
            "family": tuple(FAMILIES),
            "dtype": tuple(DTYPES),
            "layout": ("NHD", "HND"),
            "schedule": ("uniform", "fixed", "balanced"),
            "poison": tuple(POISON),
            "pages": ("shuffled", "reversed", "ordered", "shared"),
            "memory": ("contiguous", "interleaved", "stacked", "padded"),
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"num_q_heads: expected a multiple of {self.num_kv_heads}, got {self.num_q_heads}")
        if self.schedule == "fixed" and self.pages_per_split is None:
            raise ValueError("pages_per_split: expected a number with schedule='fixed', got None")

    def __repr__(self) -> str:
        given = [f for f in fields(self) if f.name == "name" or getattr(self, f.name) != f.default]
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def output_dtype(self) -> str:
        """`out_dtype`, or the dtype of q."""
        return self.out_dtype or self.dtype

    def splits(self) -> dict[str, int | None]:
        """`num_splits` and `pages_per_split`, as a schedule of stated cuts takes them: one is None."""
        if self.schedule == "fixed":
            return {"num_splits": None, "pages_per_split": self.pages_per_split}
        return {"num_splits": self.num_splits, "pages_per_split": None}

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `cupy_kernels.paged_decode` beyond the arrays, sm_scale and layout."""
        return {
            "schedule": self.schedule,
            **{name: value for name, value in self.splits().items() if value is not None},
            "partial_dtype": self.partial_dtype,
            "out_dtype": DTYPES[self.output_dtype],
        }

    def arithmetic(self) -> Arithmetic:
        """What the readable kernels, `partial.cu` and `merge.cu`, do to the numbers of this case."""
        return Arithmetic(
            # Chunks of 8 from zero, added in sequence: the first addition, to zero, is exact.
            dot_depth=8 + self.head_dim // 8 - 1,
            pv="fma_tile",
            l_sum="tree",
            tile=32,
            # ln2 as two floats in an FMA.
            lse_m=0.0,
            partial_dtype=self.partial_dtype,
            out_dtype=self.output_dtype,
        )


# Seconds on the CPU stand-in: one case of each kind.
smoke = [
    Case("smoke-ragged", context_lens=(0, 37, 1000), page_size=16),
    Case("smoke-unsplit", context_lens=(200, 33), num_splits=1),
    Case("smoke-fixed", context_lens=(130, 5), schedule="fixed", pages_per_split=3),
    Case("smoke-bf16", dtype="bfloat16", context_lens=(90, 17), head_dim=128),
    Case("smoke-fp32", dtype="float32", context_lens=(90, 17), layout="HND"),
    Case("smoke-g7", num_q_heads=14, context_lens=(77,), page_size=4),
    Case("smoke-large", family="large", context_lens=(150, 64)),
    Case("smoke-offset", family="offset_minus", context_lens=(150, 64), head_dim=128),
    Case("smoke-flip", family="split_flip", context_lens=(256, 128), head_dim=128),
    Case("smoke-gqa", family="gqa_id", num_q_heads=8, num_kv_heads=4, context_lens=(60, 1)),
    Case("smoke-needle", family="needle_last", context_lens=(127, 129)),
    Case("smoke-nan", family="nan_k", context_lens=(48, 20)),
]


def _edge() -> list[Case]:
    """Shapes and values that gave a wrong answer somewhere, each kind by a few of its members, all small."""
    cases = [
        # Empty requests and splits, in every place of a batch.
        *(Case(f"empty-{'-'.join(map(str, lens))}", context_lens=lens) for lens in [(0,), (0, 9), (9, 0), (1, 3), (0, 0)]),
        Case("empty-batch", context_lens=()),
        Case("empty-hidden-max", family="neg_1e5", context_lens=(5, 0, 40)),
        Case("empty-neighbours", family="offset_minus", context_lens=(0, 70, 0)),
        # Around a page, and around the page that all splits have in common.
        Case("lengths-page-16", context_lens=(15, 16, 17, 63, 64, 65)),
        Case("lengths-page-4", context_lens=(3, 4, 5, 11, 12, 13), page_size=4, num_splits=3),
        Case("lengths-fixed", context_lens=(0, 1, 31, 32, 33, 96), schedule="fixed", pages_per_split=2),
        Case("lengths-mixed", context_lens=(32, 64, 96, 48), page_size=32, family="ramp_up"),
    ]
    # Everything that must not be read, by what it holds.
    for poison in ("nan", "inf", "large", "zero"):
        cases += [
            Case(f"poison-{poison}", context_lens=(13, 1, 0, 3), page_size=4, poison=poison),
            Case(f"poison-{poison}-fp32", context_lens=(13, 50), poison=poison, dtype="float32", num_splits=1),
        ]
    for page_size in (1, 2, 4, 8, 32, 48, 64, 96, 256):
        cases.append(Case(f"page-{page_size}", page_size=page_size, context_lens=(page_size, 97, page_size + 1), num_splits=3))
    for pages in ("ordered", "reversed", "shared"):
        cases.append(Case(f"pages-{pages}", pages=pages, context_lens=(70, 64, 100)))
    # More splits than pages, and numbers that divide nothing.
    for num_splits in (1, 2, 3, 7, 33, 200):
        cases.append(Case(f"splits-{num_splits}", num_splits=num_splits, context_lens=(100, 5, 0)))
    for num_q_heads, num_kv_heads in [
        (1, 1), (2, 2), (4, 2), (3, 1), (8, 2), (5, 1), (6, 1), (28, 4), (8, 1), (12, 1), (24, 24), (16, 1), (17, 1),
        (32, 1), (128, 2),
    ]:  # fmt: skip
        cases.append(
            Case(
                f"heads-{num_q_heads}-{num_kv_heads}", num_q_heads=num_q_heads, num_kv_heads=num_kv_heads,
                context_lens=(40, 7), head_dim=32, num_splits=2,
            )
        )  # fmt: skip
    for head_dim in (8, 32, 80, 96, 128, 192, 256):
        cases.append(Case(f"dim-{head_dim}", head_dim=head_dim, context_lens=(50, 33), num_splits=2))
    for memory in ("interleaved", "stacked", "padded"):
        for layout in ("NHD", "HND"):
            cases.append(Case(f"memory-{memory}-{layout}", memory=memory, layout=layout, context_lens=(45, 20)))
    for dtype in ("float16", "bfloat16", "float32"):
        cases.append(Case(f"dtype-{dtype}-HND", dtype=dtype, layout="HND", context_lens=(75, 16), head_dim=128))
        for partial_dtype in ("float16", "bfloat16"):
            cases.append(
                Case(f"partial-{dtype}-{partial_dtype}", dtype=dtype, partial_dtype=partial_dtype, context_lens=(75, 16))
            )
    for out_dtype in ("float32", "bfloat16"):
        cases.append(Case(f"out-{out_dtype}", out_dtype=out_dtype, context_lens=(75, 16)))
    for sm_scale in (1.0, 1e-4, 2.0):
        cases.append(Case(f"scale-{sm_scale:g}", sm_scale=sm_scale, context_lens=(75, 16), head_dim=128))
    cases += [Case(f"edge-{name}", family=name, context_lens=(45, 96, 0), head_dim=128) for name in [*FINITE, *NON_FINITE]]
    cases += [Case(f"edge-{name}-fp32", family=name, context_lens=(45, 0), dtype="float32") for name in NON_FINITE]
    return cases


def _sweep() -> list[Case]:
    """Splits x context x family."""
    cases = [
        Case(f"sweep-{name}-{context}-{num_splits}", family=name, context_lens=(context,), num_splits=num_splits, head_dim=128)
        for name in FINITE
        for context in (256, 1024)
        for num_splits in (1, 8)
    ]
    long = ("normal", "offset_plus", "ramp_up", "sink_first", "pos_v", "split_flip", "split_flip_off", "cancel")
    cases += [
        Case(f"sweep-{name}-4096-{num_splits}", family=name, context_lens=(4096,), num_splits=num_splits, dtype=dtype)
        for name, dtype in zip(long, ["float16", "bfloat16"] * 4, strict=True)
        for num_splits in (1, 4, 16, 64)
    ]
    return cases


edge, sweep = _edge(), _sweep()
LISTS = {"smoke": smoke, "edge": edge, "sweep": sweep}
