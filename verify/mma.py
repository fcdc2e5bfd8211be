"""Tensor-core accumulation: a model with its parameters open, the probes that read them off a device, and vectors to check it.

One step adds `products` exact products to a float32: all terms are aligned to the largest exponent, cut `extra` bits below
float32's last, added, and rounded to float32 (Khattak and Mikaitis, arXiv 2512.07004). The CPU stand-in has one setting of these
in C++; this is a second implementation, to find which setting a device has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .arithmetic import DTYPES

DEPTH = 16
# (a [n, 16, 16], b [n, 16, 8], c [n, 16, 8]) -> c + a b, float32: the device, or its stand-in.
Multiply = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Model:
    """How a tensor core adds."""

    # products per step; the 16 of an instruction are taken in order
    products: int = 16
    # bits kept below the last one that float32 has at the largest term
    extra: int = 2
    # "zero" (truncation) or "nearest"
    final_rounding: str = "zero"
    # what a product is aligned by: its own leading bit, or the sum of its factors' exponents (one too low at times)
    exponent: str = "sum of factors"

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """c + a b for `a [n, 16, 16]`, `b [n, 16, 8]` (16-bit) and `c [n, 16, 8]` (float32); finite, far from overflow."""
        a, b = a.astype(np.float64)[:, :, None, :], np.moveaxis(b.astype(np.float64), 1, 2)[:, None, :, :]
        products = a * b
        powers = _exponent(products) if self.exponent == "product" else _exponent(a) + _exponent(b) - 1
        powers = np.where(products == 0, -(10**6), powers)
        for first in range(0, DEPTH, self.products):
            step = slice(first, first + self.products)
            largest = np.maximum(powers[..., step].max(-1), np.where(c == 0, -(10**6), _exponent(c.astype(np.float64))))
            # A term of the largest exponent is below 2^largest; its last float32 bit is 2^(largest - 24).
            shift = np.where(largest == -(10**6), 0, 24 + self.extra - largest)
            cut = lambda x, by: np.trunc(np.ldexp(x, by))
            total = cut(c.astype(np.float64), shift) + cut(products[..., step], shift[..., None]).sum(-1)
            c = _to_float32(np.ldexp(total, -shift), self.final_rounding)
        return c


def _exponent(x: np.ndarray) -> np.ndarray:
    """e with |x| in [2^(e-1), 2^e)."""
    return np.frexp(x)[1]


def _to_float32(x: np.ndarray, rounding: str) -> np.ndarray:
    y = x.astype(np.float32)
    if rounding == "zero":
        y = np.where(np.abs(y.astype(np.float64)) > np.abs(x), np.nextafter(y, np.float32(0)), y)
    return y


MODELS = [
    Model(*setting) for setting in itertools.product((16, 8, 4), (2, 1, 0, 3), ("zero", "nearest"), ("sum of factors", "product"))
]


def vectors(dtype: str, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`a [count, 16, 16], b [count, 16, 8], c [count, 16, 8]` that lose bits: spread exponents, cancellation, zeros."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...], spread: np.ndarray) -> np.ndarray:
        # One spread for a whole product: from all exponents alike to some terms far below the last bit.
        exponents = rng.integers(-1, 2, shape) * spread[:, None, None] + rng.integers(-1, 2, shape)
        return rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape) * 2.0**exponents

    spread = rng.integers(0, 7, count)
    a, b = (draw((count, DEPTH, n), spread).astype(DTYPES[dtype]) for n in (16, 8))
    a = np.swapaxes(a, 1, 2).copy()
    a[rng.random(a.shape) < 0.05] = 0
    c = draw((count, 16, 8), 2 * spread).astype(np.float32)
    # In half of them c all but cancels the products.
    near = -(a.astype(np.float64) @ b.astype(np.float64)) * (1 + rng.uniform(-1, 1, c.shape) * 2.0**-20)
    return a, b, np.where(rng.random(c.shape) < 0.5, near.astype(np.float32), c)


def probe(multiply: Multiply, dtype: str, terms: dict[int, float], c: float = 0.0) -> float:
    """c plus the given products, by position; each is a power of two, or 1.5 times one, so that its factors are exact."""
    a, b = np.zeros((1, 16, DEPTH), DTYPES[dtype]), np.zeros((1, DEPTH, 8), DTYPES[dtype])
    for position, term in terms.items():
        significand, exponent = np.frexp(term)
        a[0, 0, position], b[0, position, 0] = np.ldexp(significand, exponent // 2), 2.0 ** (exponent - exponent // 2)
    start = np.zeros((1, 16, 8), np.float32)
    start[0, 0, 0] = c
    return float(multiply(a, b, start)[0, 0, 0])


def read_off(multiply: Multiply, dtype: str) -> dict[str, Any]:
    """What a handful of sums, each worked out by hand, say about width, alignment, rounding and grouping."""
    run = lambda terms, c=0.0: probe(multiply, dtype, terms, c)
    # 1 - 1 + 2^-t: what remains of the small term after it was aligned to 1.
    kept = [t for t in range(16, 31) if run({0: 1, 1: -1, 2: 2.0**-t}) == 2.0**-t]
    unit = 2.0 ** -max(kept)
    aligned = {run({0: 1, 1: -1, 2: sign * 1.5 * unit}) / (sign * unit) for sign in (1, -1)}
    # 1 + 3/4 ulp, and its negative: both 1 if cut, 1 + ulp if rounded to nearest.
    ulp = 2.0**-23
    final = {(sign * run({0: sign * 0.75 * ulp}, c=sign) - 1) / ulp for sign in (1.0, -1.0)}
    # The small term is lost while it shares a step with 1 and -1, and kept in a later step.
    tiny = unit / 4
    together = "".join("-" if run({0: 1, 1: -1, i: tiny}) == 0 else "+" for i in range(2, DEPTH))
    return {
        "bits_below_largest_term": max(kept),
        "extra_bits": max(kept) - 23,
        "alignment": _direction(aligned, 1),
        "final_rounding": _direction(final, 0),
        "products_per_step": 2 + together.index("+") if "+" in together else DEPTH,
        # positions 2 to 15: lost (-) or kept (+) beside 1 and -1 at positions 0 and 1
        "small_term_by_position": together,
        # c is in the step of the first products: 1 (c) - 1 + tiny
        "c_shares_first_step": run({0: -1, 1: tiny}, c=1.0) == 0,
    }


def _direction(results: set[float], cut: int) -> str:
    """What became of a fraction of a unit, for both signs: `cut` units are left if it was dropped."""
    if len(results) == 1 and results <= {cut, cut + 1}:
        return "toward zero" if results == {cut} else "to nearest"
    return f"otherwise: {sorted(results)}"


def bit_mismatches(x: np.ndarray, y: np.ndarray) -> int:
    """float32 elements that differ in their bits; the sign of zero counts."""
    return int((x.view(np.uint32) != y.view(np.uint32)).sum())


def fit(multiply: Multiply, dtype: str, count: int = 64) -> list[dict[str, Any]]:
    """The models that miss fewest of `128 * count` sums, best first, up to three; `mismatches` 0 is a match."""
    a, b, c = vectors(dtype, count, seed=1)
    got = multiply(a, b, c)
    misses = [(int((got != model.multiply(a, b, c)).sum()), i) for i, model in enumerate(MODELS)]
    return [{**asdict(MODELS[i]), "sums": got.size, "mismatches": missed} for missed, i in sorted(misses)[:3]]
