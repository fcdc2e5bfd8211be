"""Experiment: what 16 bits cost where a split decode keeps its intermediates, measured on the kernels and predicted.

A stored number is off by a rounding e of variance ulp^2 / 12. With merge weights omega_s, exact states (o_s, lse_s) and output,

    out' - out = sum omega_s (e_o,s + e_lse,s (o_s - out))      to first order in e_lse, the error of an exponent

and rho = RMS(error) / RMS(error of an ideally rounded output) is 1 where the intermediates cost nothing. Two predictions follow.
The *formula* takes roundings as independent draws: rho^2 = 1 + sum of variances / that of the output's own rounding. The *known
roundings* are those of the exact states, so that nothing is left to chance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import reference
from cupy_kernels import jit, merge_states, split_decode

from .arithmetic import DTYPES, U32, ulp
from .cases import Case, build
from .inputs import Inputs
from .kernels import arithmetic, on_device
from .mutants import MUTANTS

# By first order an error e of an lse changes a weight by e, in truth by exp(e) - 1: 3 % of e at 1/16.
SMALL = 1 / 16
TOLERANCE = 0.10
C_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
SHORT = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Storage:
    """What is kept in 16 bits: any of "o", "lse" (of partial states), "p" (of a tile) and "acc" (after each tile)."""

    parts: tuple[str, ...]
    dtype: str = "float16"

    def __str__(self) -> str:
        return f"{'all four' if len(self.parts) > 1 else self.parts[0]} {SHORT[self.dtype]}" if self.parts else "float32"

    @property
    def partial_dtype(self) -> str:
        """For the public call: the only one of these that it offers."""
        return self.dtype if "o" in self.parts else "float32"

    @property
    def patches(self) -> jit.Patches:
        """The others are faults, planted as the mutants of that kind are."""
        names = {"lse": "lse_bf16", "p": "p_bf16", "acc": "acc_fp16"}
        planted = [patch for part in self.parts if part in names for m in MUTANTS if m.name == names[part] for patch in m.patches]
        other = lambda text: functools.reduce(
            lambda t, c: t.replace(f"<{c}>", f"<{C_TYPES[self.dtype]}>"), C_TYPES.values(), text
        )
        return tuple((file, old, other(new)) for file, old, new in planted)


PARTIALS = tuple(Storage((part,), dtype) for part in ("o", "lse") for dtype in SHORT)
INSIDE = tuple(Storage(parts, dtype) for parts in (("p",), ("acc",), ("o", "lse", "p", "acc")) for dtype in SHORT)
STORAGES = (Storage(()), *PARTIALS, *INSIDE)


@dataclass(frozen=True)
class Cell:
    """One configuration and storage: rho as measured on the kernels and as predicted."""

    storage: Storage
    family: str
    context: int
    num_splits: int
    measured: float
    formula: float
    # None where the roundings of P or acc are among them
    known: float | None
    # whether lse next to a tie, which a float32 error may round either way, leave `known` as it is
    decided: bool
    # half an ulp of the largest stored lse
    lse_error: float
    # RMS of the weighted partial o, omega o, added in squares over the splits, against RMS of the output
    cancellation: float

    @property
    def claimed(self) -> bool:
        """Whether measured and known must agree: partial states, the lse's error small against 1, and its sign no toss-up."""
        return bool(self.storage.parts) and self.known is not None and self.lse_error <= SMALL and self.decided

    @property
    def drawn(self) -> bool:
        """Whether the formula must agree too: the roundings carry as much error as independent draws would."""
        return self.claimed and abs(self.formula / self.known - 1) <= TOLERANCE / 2  # type: ignore[operator]

    @property
    def off(self) -> float:
        """Largest deviation from a prediction that must hold, relative; 0 without a claim."""
        claims = [self.known] * self.claimed + [self.formula] * self.drawn
        return max((abs(self.measured / x - 1) for x in claims), default=0.0)  # type: ignore[operator]


def case(family: str, context: int, num_splits: int, seed: int = 0) -> Case:
    """64 rows of 64 outputs; pages of 8 tokens, so that 1024 of them can be split 128 times."""
    return Case(
        f"precision-{family}-{context}-{num_splits}", family=family, seed=seed, context_lens=(context,) * 4, page_size=8,
        num_q_heads=16, num_kv_heads=2, num_splits=num_splits, kernel="readable",
    )  # fmt: skip


def measure(each: Case, storage: Storage, device: str = "cpu") -> float:
    """RMS error of the kernels' float16 output, with these intermediates in 16 bits."""
    xp: Any = np
    if device == "gpu":
        import cupy as xp  # type: ignore[no-redef]
    inputs, out = drawn(each)
    with jit.settings(patches=storage.patches, readable=True):
        states = split_decode(**on_device(inputs, xp), num_splits=each.num_splits, partial_dtype=storage.partial_dtype)
        merged = merge_states(*states, out_dtype="float16")[0]
    got = merged if xp is np else xp.asnumpy(merged)
    return float(np.sqrt(((got.astype(np.float64) - out) ** 2).mean()))


def cells(each: Case, device: str = "cpu") -> list[Cell]:
    """All storages of one case. ValueError if its exact output has no rounding error to compare with."""
    exact = Exact(each)
    if exact.ideal < 0.01 * np.sqrt((ulp(exact.out, "float16") ** 2).mean()):
        raise ValueError(f"family {each.family}: expected outputs that are rounded, got numbers of float16")
    return [exact.cell(each, storage, measure(each, storage, device)) for storage in STORAGES]


@functools.lru_cache(maxsize=2)
def drawn(each: Case) -> tuple[Inputs, np.ndarray]:
    """The inputs of a case and the exact output."""
    inputs = build(each)
    return inputs, reference.paged_decode(**inputs.call())[0]


class Exact:
    """The exact states of one case, non-empty splits alone: axes s split, r row (request and query head), d."""

    def __init__(self, each: Case) -> None:
        inputs, _ = drawn(each)
        heads = [_Head(each, inputs, b, kv_head) for b in range(len(each.context_lens)) for kv_head in range(each.num_kv_heads)]
        joined = lambda name, axis: np.concatenate([getattr(head, name) for head in heads], axis)
        self.o, self.lse, self.omega, self.out = joined("o", 1), joined("lse", 1), joined("omega", 1), joined("out", 0)
        # variance of the output from rounded P and acc, by dtype
        self.inside = {
            part: {dtype: np.concatenate([getattr(head, part)[dtype] for head in heads]) for dtype in SHORT}
            for part in ("p", "acc")
        }
        self.ideal = np.sqrt(((round_to(self.out, "float16") - self.out) ** 2).mean())

    def formula(self, storage: Storage) -> float:
        """rho with roundings as independent draws of variance ulp^2 / 12, for any storage."""
        dtype, weight, variance = storage.dtype, self.omega[..., None], np.zeros_like(self.out)
        for part in storage.parts:
            if part == "o":
                variance += ((weight * ulp(self.o, dtype)) ** 2).sum(0)
            elif part == "lse":
                variance += ((weight * ulp(self.lse, dtype)[..., None] * (self.o - self.out)) ** 2).sum(0)
            else:
                variance += 12 * self.inside[part][dtype]
        return math.sqrt(1 + variance.sum() / (ulp(self.out, "float16") ** 2).sum())

    def known(self, storage: Storage, ties_the_other_way: bool = False) -> float:
        """rho with the roundings of the exact states, for partial states; lse that are nearly ties may go the other way."""
        dtype, weight, error = storage.dtype, self.omega[..., None], np.zeros_like(self.out)
        if "o" in storage.parts:
            error += (weight * (round_to(self.o, dtype) - self.o)).sum(0)
        if "lse" in storage.parts:
            rounding, step = round_to(self.lse, dtype) - self.lse, ulp(self.lse, dtype)
            # The kernels round an lse that is off by some units of float32 itself, the error of its largest scores included.
            tie = np.abs(rounding) > step / 2 - 16 * U32 * np.maximum(1, np.abs(self.lse))
            rounding -= np.where(tie & ties_the_other_way, np.sign(rounding) * step, 0)
            error += (weight * rounding[..., None] * (self.o - self.out)).sum(0)
        rounded = round_to(self.out + error, "float16")
        return float(np.sqrt(((rounded - self.out) ** 2).mean()) / self.ideal)

    def cell(self, each: Case, storage: Storage, error: float) -> Cell:
        """The measured RMS error of a storage beside its predictions."""
        lse_error = float(ulp(self.lse, storage.dtype).max()) / 2 if "lse" in storage.parts else 0.0
        cancellation = float(np.sqrt(((self.omega[..., None] * self.o) ** 2).sum(0).mean() / (self.out**2).mean()))
        known = self.known(storage) if set(storage.parts) <= {"o", "lse"} else None
        return Cell(
            storage, each.family, each.context_lens[0], each.num_splits or 1, error / float(self.ideal), self.formula(storage),
            known, known is None or abs(self.known(storage, True) / known - 1) <= TOLERANCE / 2, lse_error, cancellation,
        )  # fmt: skip


class _Head:
    """The same of one request and KV head."""

    def __init__(self, each: Case, inputs: Inputs, b: int, kv_head: int) -> None:
        q, k, v = (x.astype(np.float64) for x in inputs.head(b, kv_head))
        s = inputs.sm_scale * (q @ k.T)
        splits = [tokens for tokens in inputs.splits(b, **each.splits()) if tokens]
        self.lse = np.stack([np.logaddexp.reduce(s[:, t.start : t.stop], axis=1) for t in splits])
        weights = (np.exp(s[:, t.start : t.stop] - lse[:, None]) for t, lse in zip(splits, self.lse, strict=True))
        self.o = np.stack([w @ v[t.start : t.stop] for w, t in zip(weights, splits, strict=True)])
        total = np.logaddexp.reduce(self.lse, axis=0)
        self.omega = np.exp(self.lse - total)
        self.out = (self.omega[..., None] * self.o).sum(0)
        self.p = {dtype: np.zeros_like(self.out) for dtype in SHORT}
        self.acc = {dtype: np.zeros_like(self.out) for dtype in SHORT}
        for tokens, running, acc in _tiles(splits, arithmetic(each).tile, s, v):
            # p_j = exp(s_j - running), and a rounding of it comes to exp(running - total) of the output; p = 1 is exact.
            scale = np.exp(running - total)[:, None]
            p = np.exp(s[:, tokens] - running[:, None])
            for dtype in SHORT:
                spread = np.where(p == 1, 0, ulp(p, dtype) * scale)
                self.p[dtype] += np.stack([w**2 @ (v[tokens] - o) ** 2 for w, o in zip(spread, self.out, strict=True)]) / 12
                self.acc[dtype] += (ulp(acc, dtype) * scale) ** 2 / 12


def _tiles(splits: list[range], tile: int, s: np.ndarray, v: np.ndarray) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Each tile's tokens, and the running maximum `[group_size]` and accumulator `[group_size, head_dim]` after it."""
    for split in splits:
        running, acc = np.full(len(s), -np.inf), np.zeros((len(s), v.shape[1]))
        for begin, end in pairwise([*split[::tile], split.stop]):
            tokens, before = slice(begin, end), running
            running = np.maximum(before, s[:, tokens].max(1))
            acc = acc * np.exp(before - running)[:, None] + np.exp(s[:, tokens] - running[:, None]) @ v[tokens]
            yield tokens, running, acc


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """x rounded to dtype, as float64."""
    return x.astype(DTYPES[dtype]).astype(np.float64)
