"""What a kernel does to its numbers: the description that the error bounds are computed from.

`Arithmetic` says how each operation rounds, an `Order` in which order the tokens are taken. Errors of functions
are in units of `U32 = 2**-24`, the unit roundoff of float32.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np

# Unit roundoff of round to nearest, and the absolute error below the smallest normal number: half a subnormal.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
ETA = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150, "float64": 2.0**-1075}
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
U32 = UNIT["float32"]

# Error of P after storage, relative and absolute. The remainder of a pair is at most half an ulp of p and keeps
# 11 (fp16, scaled by 2^11 so that it stays normal) or 8 (bf16) bits of its own.
P_ERROR = {
    "float32": (0.0, 0.0),
    "float16": (2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-8, 2.0**-134),
    "float16x2": (2.0**-23, 2.0**-36),
    "bfloat16x2": (2.0**-17, 2.0**-134),
    "bfloat16x3": (2.0**-25, 2.0**-134),
}

# The order of one request: splits, merged through stored states; in each, running states (say, one per warp) that
# are merged before they are normalised; in each, tiles that share one update of the running maximum.
Order = list[list[list[range]]]


@dataclass(frozen=True)
class Arithmetic:
    """How a kernel rounds. ValueError for a word that is not listed at its field.

    Function errors are the documented ones (PTX ISA, CUDA programming guide); `measured` replaces them by those of
    a device.
    """

    # "fma": float32 chains and trees; "mma": tensor cores, 16-bit products, truncating accumulation
    dot: str = "fma"
    # roundings that one product q_d k_d meets on its way into the score, for "fma"; None: head_dim, any order
    dot_depth: int | None = None
    # sums side by side that a dot product on tensor cores is cut into, and that are added in the end
    dot_chains: int = 1
    # "scaled": a score is dot * constant; "bare": scores stay dot products, and an exponent is (score - maximum) * constant
    score: str = "scaled"
    # scores up to this far above the running maximum, as log2 of a weight, do not raise it: P is up to 2**lazy
    lazy: float = 0.0
    # how P is held when it multiplies V: a key of P_ERROR
    p: str = "float32"
    # P is multiplied by 2**p_shift before it is stored in 16 bits, and the power undone at the end
    p_shift: int = 0
    # l sums the rounded P that multiplies V; False: the float32 P
    l_from_p: bool = False
    # "fma": acc = fma(p, v, acc) token by token; "fma_tile": each tile from zero, then added to acc; "mma" and
    # "mma_tile": the same by tensor-core blocks; "any": float32, in whatever order
    pv: str = "any"
    # how a tile's P are added into l: "tree" (pairwise) or "chain" (in sequence, which covers every order); "lanes": 8 sums of
    # two tokens a tile each, added in the end
    l_sum: str = "chain"
    # tokens that share one update of the running maximum, for orders made by `tiled_order`
    tile: int = 1
    # running states of a split that take its tiles in turn, for orders made by `tiled_order`
    states: int = 1
    # not (): the splits of an order are shares, merged as they are, neither divided nor rounded. Each element is merged by one
    # of these numbers of threads, powers of two, which take shares in turn
    share_ways: tuple[int, ...] = ()
    # ex2.approx: 2 ulp from the correctly rounded result, that is 2.5 ulp from the exact one
    ex2: float = 5.0
    # lg2.approx: 2**-22, absolute in (0.5, 2) and relative elsewhere
    lg2: float = 4.0
    # acc / l: 1 for an IEEE division, 5 for __fdividef, 4 for rcp.approx and a multiplication
    division: float = 1.0
    # sm_scale * log2(e): 1 if rounded once, 3 if built from float32 factors
    constant: float = 1.0
    # m * ln2 in the natural lse: 1 for ln2 as one float, 0 for a compensated pair in an FMA
    lse_m: float = 1.0
    # stored partial o
    partial_dtype: str = "float32"
    # stored partial lse, natural
    lse_dtype: str = "float32"
    # stored output
    out_dtype: str = "float32"
    # "max_first": maximum of all states, then one weighted sum; "online": a running state rescaled per split
    merge: str = "max_first"
    # running sums that a merge deals its states to in turn, `merge_batch` at a time, and adds, or merges, in the end
    merge_ways: int = 1
    merge_batch: int = 1
    # tensor cores: products per block FMA and alignment bits beyond float32's: 16 and 2 on H100 and H200, 8 and 1
    # on A100, 4 and 0 on V100 (Khattak and Mikaitis, arXiv 2512.07004)
    mma_products: int = 16
    mma_extra_bits: int = 2

    def __post_init__(self) -> None:
        words = {
            "dot": ("fma", "mma"),
            "p": tuple(P_ERROR),
            "pv": ("fma", "fma_tile", "mma", "mma_tile", "any"),
            "score": ("scaled", "bare"),
            "l_sum": ("tree", "chain", "lanes"),
            "merge": ("max_first", "online"),
            "partial_dtype": tuple(UNIT),
            "lse_dtype": tuple(UNIT),
            "out_dtype": tuple(UNIT),
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @staticmethod
    def conservative(dtype: str, **fields: object) -> Arithmetic:
        """A kernel nothing is known of: tensor cores and P in the input's dtype for 16-bit inputs, else float32."""
        narrow = dtype in ("float16", "bfloat16")
        guess = Arithmetic(out_dtype=dtype, division=5.0, constant=3.0)
        if narrow:
            guess = replace(guess, dot="mma", p=dtype, pv="mma")
        return replace(guess, **fields)  # type: ignore[arg-type]

    def measured(self, path: Path) -> Arithmetic:
        """Self with the fields under the key "arithmetic" of a JSON file, such as `{"ex2": 2.1, "lg2": 1.7}`."""
        return replace(self, **json.loads(Path(path).read_text())["arithmetic"])

    def dot_error(self, head_dim: int) -> float:
        """Relative error of q.k, on the scale of sum |q_d k_d|."""
        if self.dot == "mma":
            steps = math.ceil(math.ceil(head_dim / 16) / self.dot_chains) * math.ceil(16 / self.mma_products)
            return steps * (self.mma_result + self.mma_align) + (self.dot_chains - 1) * U32
        return (head_dim if self.dot_depth is None else self.dot_depth) * U32

    def merging(self, states: int, shares: int) -> tuple[int, int]:
        """Exponentials in the weight of one running state, and roundings of its sums, until all of `shares * states` are one."""
        # The states of a share at once, or more than 8 in batches of 4, added by one fma each; each later batch may rescale.
        rescales = math.ceil(states / 4) - 1 if states > 8 else 0
        levels, roundings = (1 + rescales, states + rescales) if states > 1 else (0, 0)
        if shares == 1:
            return levels, roundings
        costs = []
        for ways in self.share_ways:
            # Shares of a thread likewise (or in batches of 8), then the threads' sums in a tree.
            own, depth = math.ceil(shares / ways), math.ceil(math.log2(min(shares, ways)))
            rescales = math.ceil(own / 4) - 1
            costs.append((levels + 1 + rescales + depth, roundings + own + rescales + 2 * depth))
        return max(costs)

    def merge_way(self, state: int) -> int:
        """The running sum of a merge that takes a state, by its place among the states."""
        return state // self.merge_batch % self.merge_ways

    @property
    def argument_roundings(self) -> int:
        """Roundings of a difference of scores on its way into ex2: the difference, and its product with the constant."""
        return 1 if self.score == "scaled" else 2

    @property
    def p_parts(self) -> tuple[int, float]:
        """How many 16-bit numbers hold one P, and how large the second may be, relative to P."""
        dtype, _, parts = self.p.rpartition("x")
        return (int(parts), UNIT[dtype]) if dtype else (1, 0.0)

    # Every term of a block FMA is truncated below 2^(e_max - 23 - extra), the result toward zero to float32 (2 u);
    # Blanchard, Higham, Lopez, Mary, Pranesh 2020 for the model: 2 u |d| + (b + 1) 2^-(23 + extra) max.
    @property
    def mma_result(self) -> float:
        """Error of one block FMA relative to its result."""
        return 2 * U32

    @property
    def mma_align(self) -> float:
        """Error of one block FMA relative to its largest term."""
        return (self.mma_products + 1) * 2.0 ** -(23 + self.mma_extra_bits)


def rounding(x: np.ndarray, dtype: str) -> np.ndarray:
    """Largest error of rounding x to dtype: u|x|, but never below half the smallest subnormal. Overflow: inf."""
    x = np.abs(x)
    largest = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    return np.where(x > largest, np.inf, np.maximum(UNIT[dtype] * x, ETA[dtype]))


def ulp(x: np.ndarray, dtype: str) -> np.ndarray:
    """Spacing of dtype's numbers at x (of the binade that holds |x|), float64."""
    smallest = float(ml_dtypes.finfo(DTYPES[dtype]).smallest_normal)
    _, exponent = np.frexp(np.maximum(np.abs(np.asarray(x, np.float64)), smallest))
    return np.ldexp(2 * UNIT[dtype], exponent - 1)


def token_splits(context_len: int, page_size: int, *, num_splits: int = 1, pages_per_split: int | None = None) -> list[range]:
    """Tokens of each split of a request. Cuts are at page boundaries; trailing splits may be empty.

    With `pages_per_split` ("fixed") there are as many splits as the context needs, at least one; otherwise
    ("uniform") `num_splits` of `ceil(pages / num_splits)` pages.
    """
    pages = -(-context_len // page_size)
    if pages_per_split is None:
        pages_per_split = -(-pages // num_splits)
    else:
        num_splits = max(1, -(-pages // pages_per_split))
    tokens = pages_per_split * page_size
    cuts = [min(i * tokens, context_len) for i in range(num_splits + 1)]
    return [range(a, b) for a, b in pairwise(cuts)]


def tiled_order(splits: list[range], tile: int, states: int = 1) -> Order:
    """The order of a kernel that walks each split in tiles; tile i belongs to running state `i % states`."""
    order = []
    for split in splits:
        tiles = [split[i : i + tile] for i in range(0, len(split), tile)]
        order.append([tiles[w::states] for w in range(states) if tiles[w::states]])
    return order
