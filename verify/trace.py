"""One query head worked through as on paper: every split, the merge, the unsplit softmax, and what the kernels make of it."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cupy_kernels import merge_states, paged_decode, split_decode, split_ranges

State = tuple[np.ndarray, float]


@dataclass(frozen=True)
class Split:
    """The state of one split in float64. Intervals are half open; o is `[head_dim]`, zeros if the split is empty."""

    pages: tuple[int, int]
    tokens: tuple[int, int]
    m: float
    l: float
    o: np.ndarray
    lse: float
    # exp(lse - max lse)
    weight: float


@dataclass(frozen=True)
class Trace:
    """A worked example: states are `(o [head_dim], lse)`, the kernels' ones float32, all others float64."""

    scores: np.ndarray
    values: np.ndarray
    page_size: int
    # entry i is where page i lies in the pool
    page_table: list[int]
    splits: list[Split]
    # maximum of the splits' lse, and the sum of their weights
    m: float
    l: float
    merged: State
    unsplit: State
    # the mean of the o of the splits that are not empty: the classic mistake
    plain_average: np.ndarray
    kernel_splits: list[State]
    kernel_merged: State
    kernel_unsplit: State


def state(scores: np.ndarray, values: np.ndarray) -> tuple[float, float, np.ndarray, float]:
    """`(m, l, o, lse)` of some tokens by the formulas of the README, float64; `(-inf, 0, 0, -inf)` of none."""
    m = float(scores.max(initial=-math.inf))
    p = np.exp(scores - (0 if m == -math.inf else m))
    l = float(p.sum())
    if l == 0:
        return m, l, np.zeros(values.shape[1]), -math.inf
    return m, l, p @ values / l, m + math.log(l)


def trace(scores: np.ndarray, values: np.ndarray, page_size: int, num_splits: int, device: str = "cpu") -> Trace:
    """Works `scores [context_len]` and `values [context_len, head_dim]` through, with `ceil(context_len / page_size)` pages."""
    splits = []
    for begin, end in split_ranges(len(scores), page_size, num_splits):
        first, last = (min(page * page_size, len(scores)) for page in (begin, end))
        splits.append(Split((begin, end), (first, last), *state(scores[first:last], values[first:last]), weight=0.0))
    top = max(split.lse for split in splits)
    weights = [math.exp(split.lse - top) if split.lse > -math.inf else 0.0 for split in splits]
    splits = [Split(**{**vars(split), "weight": w}) for split, w in zip(splits, weights, strict=True)]
    l = sum(weights)
    o = sum((w * split.o for w, split in zip(weights, splits, strict=True)), np.zeros(values.shape[1]))
    _, _, unsplit_o, unsplit_lse = state(scores, values)
    full = [split.o for split in splits if split.l > 0]
    table, *kernel_states = _run_kernels(scores, values, page_size, num_splits, device)
    return Trace(
        scores, values, page_size, table, splits, top, l,
        (o / l, top + math.log(l)) if l else (o, -math.inf), (unsplit_o, unsplit_lse),
        np.mean(full, axis=0) if full else np.zeros(values.shape[1]), *kernel_states,
    )  # fmt: skip


def _run_kernels(scores: np.ndarray, values: np.ndarray, page_size: int, num_splits: int, device: str) -> tuple[Any, ...]:
    """The page table, and the kernels' states: of each split, of their merge, of the unsplit call.

    q is the first unit vector and k[j, 0] the score, so that the dot product is exact. Pages are shuffled and padded with NaN.
    """
    xp = np
    if device == "gpu":
        import cupy as xp  # type: ignore[no-redef]
    length, width = values.shape
    head_dim = -(-width // 8) * 8
    pages = -(-length // page_size)
    table = np.random.default_rng(0).permutation(pages + 2)[:pages]
    k, v = (np.full((pages + 2, page_size, 1, head_dim), np.nan, np.float32) for _ in range(2))
    page, slot = table[np.arange(length) // page_size], np.arange(length) % page_size
    k[page, slot], v[page, slot] = 0, 0
    k[page, slot, 0, 0], v[page, slot, 0, :width] = scores, values
    arrays = (np.eye(1, head_dim, dtype=np.float32)[None], k, v, table[None].astype(np.int32), np.array([length], np.int32))
    q, *rest = map(xp.asarray, arrays)
    o_part, lse_part = split_decode(q, *rest, sm_scale=1.0, num_splits=num_splits)
    on_host = np.asarray if xp is np else xp.asnumpy  # type: ignore[attr-defined]
    results = [(o_part, lse_part), merge_states(o_part, lse_part), paged_decode(q, *rest, sm_scale=1.0, num_splits=1)]
    parts, merged, unsplit = [(on_host(o)[0, 0, ..., :width], on_host(lse)[0, 0]) for o, lse in results]
    states = [(o, float(lse)) for o, lse in zip(*parts, strict=True)]
    return table.tolist(), states, (merged[0], float(merged[1])), (unsplit[0], float(unsplit[1]))


def number(x: float, digits: int = 6) -> str:
    """x to `digits` significant digits."""
    return f"{x:.{digits}g}"


def vector(x: np.ndarray, digits: int = 6) -> str:
    """A bare number for a head of one, else [a, b, ...]."""
    inner = ", ".join(number(value, digits) for value in x)
    return inner if len(x) == 1 else f"[{inner}]"


def _listed(items: list[str], separator: str, shown: int = 4) -> str:
    """All items, or the first and last of many."""
    return separator.join(items if len(items) <= shown else [*items[: shown - 2], "...", items[-1]])


def write(console: Console, worked: Trace) -> None:
    """Prints the worked example."""
    say = lambda text="": console.print(text, markup=False, highlight=False, soft_wrap=True)
    heading = lambda text: console.print(f"\n[bold]{text}[/bold]", highlight=False)
    n, pages = len(worked.scores), len(worked.page_table)
    say(f"{n} tokens on {pages} pages of {worked.page_size}, in {len(worked.splits)} splits; intervals are half open")
    if pages:
        say(f"in the pool, the pages of the request are {_listed(list(map(str, worked.page_table)), ', ', 8)}")
    for i, split in enumerate(worked.splits):
        a, b = split.tokens
        heading(f"split {i}: pages \\[{split.pages[0]}, {split.pages[1]}), tokens \\[{a}, {b})")
        if split.l == 0:
            say("  nothing to see: o = 0 and lse = -inf, so its weight is exp(-inf) = 0. (0 / 0 would be NaN.)")
            continue
        p = list(np.exp(worked.scores[a:b] - split.m))
        terms = [f"{number(x)} x {vector(v)}" for x, v in zip(p, worked.values[a:b], strict=True)]
        say(f"  s   = {_listed(list(map(number, worked.scores[a:b])), ', ')}, so m = {number(split.m)}")
        say(f"  p   = exp(s - m) = {_listed(list(map(number, p)), ', ')}, so l = {number(split.l)}")
        say(f"  o   = ({_listed(terms, ' + ')}) / {number(split.l)} = {vector(split.o)}")
        say(f"  lse = m + log(l) = {number(split.m)} + {number(math.log(split.l))} = {number(split.lse)}")

    heading("all splits")
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("split", "pages", "tokens", "m", "l", "o", "lse", "weight"):
        table.add_column(name, justify="left" if name in ("pages", "tokens") else "right", no_wrap=True)
    for i, x in enumerate(worked.splits):
        spans = [f"\\[{a}, {b})" for a, b in (x.pages, x.tokens)]
        mean = vector(x.o).replace("[", "\\[")
        table.add_row(str(i), *spans, number(x.m), number(x.l), mean, number(x.lse), number(x.weight))
    console.print(table, highlight=False)

    heading("merge")
    full = [split for split in worked.splits if split.l > 0]
    terms = [f"{number(split.weight)} x {vector(split.o)}" for split in full]
    say(f"  m   = max lse = {number(worked.m)}, weights w = exp(lse - m), l = sum of w = {number(worked.l)}")
    if full:
        say(f"  o   = ({_listed(terms, ' + ')}) / {number(worked.l)} = {vector(worked.merged[0], 8)}")
        say(f"  lse = m + log(l) = {number(worked.m)} + {number(math.log(worked.l))} = {number(worked.merged[1], 8)}")
    else:
        say("  every split is empty, and so is the result: o = 0, lse = -inf")

    heading("the same by other ways")
    rows = [
        ("unsplit softmax", worked.unsplit),
        ("split_decode and merge_states", worked.kernel_merged),
        ("paged_decode, num_splits=1", worked.kernel_unsplit),
    ]
    for name, (o, lse) in rows:
        say(f"  {name:<30} o = {vector(o, 8)}, lse = {number(lse, 8)}")
    if not np.allclose(worked.plain_average, worked.merged[0], rtol=1e-12, equal_nan=True):
        say(f"  {'plain average of the o: wrong':<30} o = {vector(worked.plain_average, 8)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m verify trace`."""
    parser.add_argument("--context-len", type=int, metavar="N", help="tokens with random scores and values")
    parser.add_argument("--scores", type=numbers, metavar="S,...", help="one score a token (--scores=-1,2 if the first is < 0)")
    parser.add_argument("--values", type=numbers, metavar="V,...", help="one value a token, for --scores")
    parser.add_argument("--page-size", type=int, metavar="N", help="tokens a page; 16, or 1 with --scores")
    parser.add_argument("--num-splits", type=int, default=4, metavar="N")
    parser.add_argument("--head-dim", type=int, default=2, metavar="N", help="of random values")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random scores and values")


def numbers(text: str) -> np.ndarray:
    """A comma-separated list of numbers; ValueError for anything else."""
    return np.array([float(item) for item in text.split(",")])


def run(arguments: argparse.Namespace, device: str) -> None:
    """`python -m verify trace`. ValueError for options that do not fit together."""
    scores, values = arguments.scores, arguments.values
    if (scores is None) == (arguments.context_len is None):
        raise ValueError("trace: expected either --context-len or --scores and --values")
    if (scores is None) != (values is None) or (scores is not None and len(scores) != len(values)):
        raise ValueError("trace: expected as many --values as --scores")
    for name, least in (("context_len", 0), ("page_size", 1), ("num_splits", 1), ("head_dim", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    if scores is None:
        rng = np.random.default_rng(arguments.seed)
        # Numbers of few digits: the example is to be checked by hand.
        scores = rng.normal(0, 2, arguments.context_len).round(2)
        values = rng.integers(-99, 100, (arguments.context_len, arguments.head_dim)).astype(float)
    else:
        values = values[:, None]
    page_size = arguments.page_size or (1 if arguments.scores is not None else 16)
    write(Console(highlight=False), trace(scores, values, page_size, arguments.num_splits, device))
