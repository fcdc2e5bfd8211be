"""Input families: each makes the inputs of one request and KV head that expose a kind of fault.

A group shares K, so keys can aim at one direction only. Families that place scores therefore give every head of
the group the same direction with its own length, from 1 down to just above 1/2 (`_queries`): head 0 meets the targets,
head g meets them scaled. What the rounding of K to the storage dtype does to a score is part of the input: references
and budgets see the rounded arrays.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .arithmetic import DTYPES

LN2 = np.log(2)


@dataclass(frozen=True)
class Shape:
    """What a family may depend on: one request and KV head of a case."""

    # visible tokens, >= 1
    context_len: int
    group_size: int
    head_dim: int
    # storage dtype, a key of DTYPES
    dtype: str
    sm_scale: float
    # tokens of a full split
    tokens_per_split: int
    page_size: int
    kv_head: int = 0
    # tokens that share one update of the running maximum
    tile: int = 32
    # keys seen by the query, the last ones; None: all
    window: int | None = None

    @property
    def split(self) -> np.ndarray:
        """Split of each token."""
        return np.arange(self.context_len) // max(1, self.tokens_per_split)


Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
Exact = Callable[[Shape, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Family:
    """A generator of `q [group_size, D], k [context_len, D], v [context_len, D]`, float64 before storage."""

    name: str
    # the faults it brings to light
    exposes: str
    generate: Callable[[np.random.Generator, Shape], Rows]
    # the output [group_size, D] of exact arithmetic, from the stored rows, where a correct kernel must hit it
    exact: Exact | None = None
    # the exact output is only promised after rounding to 16 bits
    exact_in_16_bits_only: bool = False
    # a visible NaN or inf is part of the inputs
    nonfinite: bool = False

    def draw(self, seed: tuple[int, ...], shape: Shape) -> Rows:
        """The rows in the storage dtype, a function of the family's name, the seed and the shape alone.

        ValueError if a family of finite inputs leaves the range of the storage dtype.
        """
        rng = np.random.default_rng((zlib.crc32(self.name.encode()), *seed))
        with np.errstate(over="ignore"):
            q, k, v = (x.astype(DTYPES[shape.dtype]) for x in self.generate(rng, shape))
        if not self.nonfinite and not all(np.isfinite(x.astype(np.float64)).all() for x in (q, k, v)):
            raise ValueError(f"family {self.name}: not finite in {shape}")
        return q, k, v


FAMILIES: dict[str, Family] = {}


def family(name: str, exposes: str, **properties: object) -> Callable:
    """Register a generator under `name`."""

    def register(generate: Callable[[np.random.Generator, Shape], Rows]) -> Callable:
        FAMILIES[name] = Family(name, exposes, generate, **properties)  # type: ignore[arg-type]
        return generate

    return register


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """x rounded to the storage dtype, as float64."""
    return x.astype(DTYPES[dtype]).astype(np.float64)


def keys(rng: np.random.Generator, shape: Shape, q: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Keys whose scores with q `[head_dim]` are `target [context_len]`, natural logs, up to the storage of K.

    A small random part orthogonal to q keeps the keys different.
    """
    length = np.linalg.norm(q)
    direction = q / length
    noise = 0.05 * rng.standard_normal((len(target), len(q)))
    noise -= np.outer(noise @ direction, direction)
    return noise + np.outer(target / (shape.sm_scale * length), direction)


def aim(rng: np.random.Generator, shape: Shape, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q `[group_size, D]` and keys that give head 0 the scores `target`, and head g the same scaled down."""
    q = stored(rng.standard_normal(shape.head_dim), shape.dtype)
    # Far targets need a long q to keep K inside float16; powers of two change no bit of it.
    largest = np.abs(target).max() / shape.sm_scale * np.abs(q).max() / (q @ q)
    q = q * 2.0 ** max(0, np.ceil(np.log2(largest / 2e4 + 1e-30)))
    lengths = 1 - np.arange(shape.group_size) / (2 * shape.group_size)
    return np.outer(lengths, q), keys(rng, shape, q, target)


def normal(rng: np.random.Generator, shape: Shape) -> Rows:
    """Standard normal q, k, v."""
    n, d = shape.context_len, shape.head_dim
    draw = rng.standard_normal
    return draw((shape.group_size, d)), draw((n, d)), draw((n, d))


def largest_value(dtype: str) -> float:
    """The largest V worth storing: 65504, or what float32 sums of a few 10k still hold."""
    return 65504.0 if dtype == "float16" else 3e38
