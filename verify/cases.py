"""Cases: what is run through reference and kernels; `verify.lists` has them by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from . import family_list  # noqa: F401  registers the families
from .arithmetic import DTYPES, Arithmetic
from .build import POISON, build
from .descriptions import readable, takes_tensor_cores, tensor_cores
from .families import FAMILIES

__all__ = ["FINITE", "NON_FINITE", "Case", "build"]

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
    # "auto": the kernels that a user gets, on tensor cores where they can; "readable": partial.cu
    kernel: str = "auto"
    # "uniform": num_splits per request; "fixed": pages_per_split; or "balanced", which cuts where it likes
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
            "kernel": ("auto", "readable"),
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

    @property
    def on_tensor_cores(self) -> bool:
        """Whether the tensor-core kernels take it."""
        return takes_tensor_cores(self)

    def splits(self) -> dict[str, int | None]:
        """`num_splits` and `pages_per_split`, as its schedule takes them: at most one is a number."""
        return {
            "num_splits": self.num_splits if self.schedule == "uniform" else None,
            "pages_per_split": self.pages_per_split if self.schedule == "fixed" else None,
        }

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `cupy_kernels.paged_decode` beyond the arrays, sm_scale and layout."""
        return {
            "schedule": self.schedule,
            **{name: value for name, value in self.splits().items() if value is not None},
            "partial_dtype": self.partial_dtype,
            "out_dtype": DTYPES[self.output_dtype],
        }

    def arithmetic(self) -> Arithmetic:
        """What the kernels do to the numbers of this case."""
        return tensor_cores(self) if self.on_tensor_cores else readable(self)
