"""The tiers: an output against the exact result, each tier by its own rule, each verdict with its worst element.

Every tier compares with float64 on the stored inputs. No element is skipped and NaN never equals NaN: where the exact
result is not finite, the output must not be either, and nowhere else.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import DTYPES, UNIT, Arithmetic, rounding
from .budget import Budget
from .inputs import Inputs
from .population import Population
from .verdict import Report, Verdict, Worst

# 4.9 sigma was the worst of 8.1 million simulated outputs.
SIGMAS = 6


def compare(
    out: np.ndarray,
    lse: np.ndarray | None,
    budget: Budget,
    arithmetic: Arithmetic,
    *,
    inputs: Inputs | None = None,
    family: str | None = None,
    reference: tuple[np.ndarray, np.ndarray] | None = None,
    partial: tuple[np.ndarray, np.ndarray, Budget] | None = None,
    lse_base: str = "e",
) -> Report:
    """Judge one output by T0 to T7, as far as the arguments allow.

    Args:
        out: `[batch_size, num_q_heads, head_dim]` in dtype `arithmetic.out_dtype`; lse: `[batch_size,
            num_q_heads]` float32, in base `lse_base` ("e" or "2"), or None.
        budget: from `decode_budget` with the same arithmetic. inputs: for T0. family: T4 is about "normal".
        reference: `(out, lse)` in float64 to compare with; None: the budget's own.
        partial: stored `o [..., num_splits, head_dim]`, `lse [..., num_splits]` and their `partial_budget`, for
            T6.

    TypeError for another dtype than the arithmetic says, ValueError for a wrong shape.
    """
    want, want_lse = (budget.out, budget.lse) if reference is None else reference
    check("out", out, want.shape, arithmetic.out_dtype)
    empty = np.isneginf(want_lse)
    got = out.astype(np.float64)
    statistics = Population(out, got, want, budget, arithmetic)
    verdicts = [
        _exact(out, inputs, arithmetic),
        _bounded("T1", got, want, budget.total, budget, empty, out),
        _bounded("T2", got, want, sigma_limit(budget, arithmetic), budget, empty, out),
        statistics.rms(),
        statistics.lean(),
        statistics.fraction(family),
    ]
    if lse is not None:
        check("lse", lse, want_lse.shape, "float32")
        verdicts.append(_lse("T5", lse, want_lse, budget, lse_base))
    if partial is not None:
        verdicts.append(_partial(*partial, lse_base, arithmetic))
    verdicts.append(_non_finite(got, want, lse, want_lse))
    return Report({v.tier: v for v in verdicts}, {**statistics.measures, "ratio": verdicts[1].ratio})


def check(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: str) -> None:
    """TypeError unless of this dtype, ValueError unless of this shape."""
    if array.dtype != DTYPES[dtype]:
        raise TypeError(f"{name}: expected dtype {dtype}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")


def sigma_limit(budget: Budget, arithmetic: Arithmetic) -> np.ndarray:
    """T2: rounding of the output, 6 sigma, and what may lean to one side; never above the bound."""
    # |out| may be off by a little when it is rounded.
    final = rounding(budget.out, arithmetic.out_dtype) * (1 + 2 * UNIT[arithmetic.out_dtype])
    return np.minimum(budget.total, final + SIGMAS * budget.sigma + budget.bias)


def bitwise(results: list[tuple[np.ndarray, ...]]) -> Verdict:
    """T0b: every result has the first one's bits, NaN payloads and the sign of zero included.

    Each result is a tuple of arrays, (out, lse) say, of the same shapes and dtypes. ValueError below two results.
    """
    if len(results) < 2:
        raise ValueError(f"results: expected at least 2, got {len(results)}")
    for run, result in enumerate(results[1:], 1):
        for first, other in zip(results[0], result, strict=True):
            check("results", other, first.shape, first.dtype.name)
            if (differs := bits(first) != bits(other)).any():
                index = tuple(map(int, np.argwhere(differs)[0]))
                worst = Worst(index, float(other[index]), float(first[index]), {})
                return Verdict("T0b", "fail", np.inf, f"run {run}: {differs.sum()} elements differ", worst)
    return Verdict("T0b", "pass", 0.0, f"{len(results)} results, the same bits")


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of each element, as unsigned integers."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _exact(out: np.ndarray, inputs: Inputs | None, a: Arithmetic) -> Verdict:
    """T0: families of exact outputs, and requests of one token, whose output is that token's V."""
    if inputs is None:
        return Verdict("T0", "n/a", 0.0)
    want = np.full(out.shape, np.nan)
    if inputs.exact is not None and (a.out_dtype != "float32" or not inputs.exact_in_16_bits_only):
        want = inputs.exact.copy()
    for b in np.flatnonzero(inputs.context_lens == 1).tolist():
        heads = [inputs.head(b, kv_head) for kv_head in range(inputs.num_kv_heads)]
        want[b] = np.concatenate([np.broadcast_to(v[0].astype(np.float64), q.shape) for q, _, v in heads])
        # A NaN score makes the head NaN: not this tier's business.
        scored = [np.isfinite(q.astype(np.float64) @ k[0].astype(np.float64)) for q, k, _ in heads]
        want[b, ~np.concatenate(scored)] = np.nan
    # Nothing is claimed of what float32 arithmetic may flush to zero.
    claimed = np.isfinite(want) & ~((want != 0) & (np.abs(want) < 2.0**-126))
    if not claimed.any():
        return Verdict("T0", "n/a", 0.0)
    wrong = claimed & (bits(out) != bits(want.astype(out.dtype)))
    if not wrong.any():
        return Verdict("T0", "pass", 0.0, f"{claimed.sum()} elements bitwise exact")
    index = tuple(map(int, np.argwhere(wrong)[0]))
    worst = Worst(index, float(out[index]), float(want[index]), {})
    return Verdict("T0", "fail", np.inf, f"{wrong.sum()} of {claimed.sum()} elements not bitwise exact", worst)


def _bounded(
    tier: str,
    got: np.ndarray,
    want: np.ndarray,
    limit: np.ndarray,
    budget: Budget,
    empty: np.ndarray,
    stored: np.ndarray,
) -> Verdict:
    """`|got - want| <= limit` everywhere; rows that see nothing are exactly +0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(got - want)
        ratio = np.where(error == 0, 0, error / limit)
    # NaN on either side alone is infinitely wrong; on both, it is not wrong.
    ratio = np.where(np.isfinite(want), np.where(np.isnan(ratio), np.inf, ratio), np.where(np.isfinite(got), np.inf, 0))
    ratio = np.where(empty[..., None], np.where(bits(stored) == 0, 0, np.inf), ratio)
    return _verdict(tier, ratio, got, want, budget)


def _verdict(tier: str, ratio: np.ndarray, got: np.ndarray, want: np.ndarray, budget: Budget) -> Verdict:
    if ratio.size == 0:
        return Verdict(tier, "n/a", 0.0)
    index = tuple(map(int, np.unravel_index(np.argmax(ratio), ratio.shape)))
    worst = Worst(index, float(got[index]), float(want[index]), budget.by_source(index))
    beyond = int((ratio > 1).sum())
    detail = f"{beyond} of {ratio.size} elements beyond the bound" if beyond else ""
    return Verdict(tier, "fail" if beyond else "pass", float(ratio[index]), detail, worst)


def _lse(tier: str, lse: np.ndarray, want: np.ndarray, budget: Budget, base: str) -> Verdict:
    """Natural or base 2; empty is exactly -inf, and -inf is nothing but empty."""
    # One more product, rounded, and a rounded constant.
    factor, extra = (1.0, 0.0) if base == "e" else (1 / np.log(2), 2 * UNIT["float32"])
    got, want = lse.astype(np.float64), want * factor
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(got - want)
        ratio = np.where(error == 0, 0, error / (budget.lse_total * factor + extra * np.abs(want)))
    both_wrong = ~np.isfinite(want) & ~np.isfinite(got) & (np.isneginf(want) == np.isneginf(got))
    ratio = np.where(np.isfinite(want) & np.isfinite(got), ratio, np.where(both_wrong, 0, np.inf))
    return _verdict(tier, ratio, got, want, budget)


def _partial(o: np.ndarray, lse: np.ndarray, budget: Budget, base: str, a: Arithmetic) -> Verdict:
    """T6: T1 and T5 for every split, against the exact state of its tokens."""
    check("o_part", o, budget.out.shape, a.partial_dtype)
    check("lse_part", lse, budget.lse.shape, "float32")
    empty = np.isneginf(budget.lse)
    states = _bounded("T6", o.astype(np.float64), budget.out, budget.total, budget, empty, o)
    sums = _lse("T6", lse, budget.lse, budget, base)
    return max(states, sums, key=lambda v: v.ratio)


def _non_finite(got: np.ndarray, want: np.ndarray, lse: np.ndarray | None, want_lse: np.ndarray) -> Verdict:
    """T7: the same set of non-finite elements; NaN or inf is all one, but -inf in an lse means empty."""
    pairs = [(got, want, "out")]
    if lse is not None:
        pairs += [(lse.astype(np.float64), want_lse, "lse")]
    for x, y, name in pairs:
        differs = (np.isfinite(x) != np.isfinite(y)) | ((name == "lse") & (np.isneginf(x) != np.isneginf(y)))
        if differs.any():
            index = tuple(map(int, np.argwhere(differs)[0]))
            detail = f"{name}: {differs.sum()} elements finite on one side only"
            return Verdict("T7", "fail", np.inf, detail, Worst(index, float(x[index]), float(y[index]), {}))
    return Verdict("T7", "pass", 0.0, f"{(~np.isfinite(want)).sum()} non-finite elements, where they belong")
