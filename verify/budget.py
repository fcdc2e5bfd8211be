"""The forward error bound of split decode attention, per output element and per source.

Write the weights with errors as `pi_j (1 + delta_j)`, in numerator and denominator alike. Then, exactly,

    out^ - out = sum_j pi_j delta_j (v_j - out) / (1 + sum_j pi_j delta_j)

so an error of a score, an exponential, a rescale or a merge weight costs `sum pi_j |delta_j| |v_j - out|`, what is
common to all tokens cancels, and the denominator is the second-order factor applied to every source. Scores are
natural logarithms: an absolute error there is a relative error of a weight. Sums are bounded by their running
prefixes (Higham, Accuracy and Stability, 4.2), tensor-core sums by the block-FMA model (Blanchard, Higham, Lopez,
Mary, Pranesh 2020). Everything here is float64, whose own error is below 2e-15 of sum pi |v|.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from .accumulation import Layout
from .arithmetic import P_ERROR, U32, UNIT, Arithmetic, Order, rounding, tiled_order, ulp
from .inputs import Inputs
from .terms import HeadTerms, sum_of

# Every source of error, in the order in which a kernel meets them.
SOURCES = {
    "qk_dot": "q.k in float32 or on tensor cores",
    "scale_const": "rounding of sm_scale * log2(e)",
    "score_mul": "rounding of dot * constant: absolute, grows with |score|",
    "score_sub": "rounding of score - running maximum",
    "ex2": "the exponential of P",
    "rescale_w": "the exponentials that rescale what came before a new maximum",
    "rescale_mul": "rounding of acc * alpha and l * alpha",
    "underflow": "weights below 2^-126, flushed to zero",
    "flush": "inputs, products and sums below 2^-126, taken as zero",
    "p_round": "P stored in fewer bits before it multiplies V",
    "pv_acc": "accumulation of P V",
    "l_acc": "accumulation of the denominator",
    "state_merge": "running states of one split merged in the block",
    "norm": "acc / l",
    "lse_calc": "m + log(l) of the partial states",
    "lse_store": "partial lse stored in fewer bits",
    "o_store": "partial o stored in fewer bits",
    "merge_w": "merge weights",
    "merge_acc": "the weighted sum of the merge and its division",
    "out_round": "the final rounding to the output's dtype",
}


@dataclass(frozen=True)
class Budget:
    """Exact results and error bounds. The leading shape is `[batch_size, num_q_heads]`, `[..., num_splits]` for
    partial states, or `[group_size]`; D is head_dim. All float64, lse natural."""

    # exact result [..., D]
    out: np.ndarray
    # exact log-sum-exp [...]
    lse: np.ndarray
    # sum pi |v| [..., D], the scale of the output without cancellation
    magnitude: np.ndarray
    # bound per source [..., D, len(SOURCES)], the second-order factor included
    terms: np.ndarray
    # standard deviation before the final rounding, of sources that are as good as independent [..., D]
    sigma: np.ndarray
    # what may add up in one direction: truncating accumulation, a constant's rounding [..., D]
    bias: np.ndarray
    # squared ulps of stored partial o and lse, weighted as they reach the output [..., D]
    stored: np.ndarray
    # bound of the lse per source [..., len(SOURCES)]; its out_round is the final rounding
    lse_terms: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """`|computed - out|` never exceeds this, `[..., D]`."""
        return self.terms.sum(axis=-1)

    @property
    def before_rounding(self) -> np.ndarray:
        """The bound without the final rounding, `[..., D]`."""
        # Not total - rounding: where that is all of it, the difference would be 0.
        return self.terms[..., :-1].sum(axis=-1)

    @property
    def lse_total(self) -> np.ndarray:
        """`|computed lse - lse|` never exceeds this, natural, `[...]`."""
        return self.lse_terms.sum(axis=-1)

    def by_source(self, index: tuple[int, ...]) -> dict[str, float]:
        """The sources of one output element `(..., d)`, or of one lse `(...)`, largest first."""
        terms = (self.terms if len(index) == self.out.ndim else self.lse_terms)[index]
        pairs = sorted(zip(SOURCES, terms.tolist(), strict=True), key=lambda pair: -pair[1])
        return {name: value for name, value in pairs if value != 0}

    @staticmethod
    def combine(parts: list[Budget], shape: tuple[int, ...]) -> Budget:
        """Concatenate the leading axes of `parts` and give them `shape`."""
        arrays = []
        for field in fields(Budget):
            joined = np.concatenate([getattr(part, field.name) for part in parts])
            arrays.append(joined.reshape(*shape, *joined.shape[1:]))
        return Budget(*arrays)

    @staticmethod
    def empty(heads: int, head_dim: int) -> Budget:
        """Nothing visible: exactly `(0, -inf)`, and no error is allowed."""
        wide, narrow = np.zeros((heads, head_dim)), np.zeros((heads, len(SOURCES)))
        terms = np.zeros((heads, head_dim, len(SOURCES)))
        return Budget(wide, np.full(heads, -np.inf), wide, terms, wide, wide, wide, narrow)


def head_budget(q: np.ndarray, k: np.ndarray, v: np.ndarray, sm_scale: float, arithmetic: Arithmetic, order: Order) -> Budget:
    """Bounds for the query heads of one KV head.

    Args:
        q: `[group_size, head_dim]`; k, v: `[context_len, head_dim]`, the visible rows, as the kernel reads them.
        order: every token exactly once; more than one split, empty ones included, means that stored partial
            states are merged, or undivided ones where `arithmetic.share_ways` says so.

    Raises ValueError if `order` does not cover the context exactly once.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    undivided = bool(arithmetic.share_ways)
    layout = Layout.of([split for split in order if split], len(k), undivided)
    merged = len(order) > 1 and not undivided
    ways = [arithmetic.merge_way(i) for i, split in enumerate(order) if split] if merged else None
    if not len(k):
        return Budget.empty(*q.shape)
    # Visible NaN and inf are legal inputs; what they reach comes out as NaN.
    with np.errstate(all="ignore"):
        head = HeadTerms(q, k[layout.tokens], v[layout.tokens], sm_scale, arithmetic, layout, ways)
        return _assemble(head, arithmetic, layout)


def _assemble(head: HeadTerms, arithmetic: Arithmetic, layout: Layout) -> Budget:
    """Second order, final rounding, and the heads that see nothing."""
    relative = sum_of(head.lse_terms) + (0 if arithmetic.l_from_p else P_ERROR[arithmetic.p][0])
    # Errors of errors: one u per operation on the longest path, and the roundings of what is already off.
    operations = len(head.v) + layout.most_tiles + len(layout.split_starts)
    roundings = (1 + 2 * operations * U32) * (1 + UNIT[arithmetic.partial_dtype])
    # From 1 on, the weights may be anything, and so may the output.
    factor = np.where(relative >= 1, np.inf, roundings / np.abs(1 - relative))
    zero = np.zeros_like(head.out)
    terms = np.stack([head.terms.get(name, zero) for name in SOURCES], axis=-1)
    terms = np.where(np.isinf(factor)[:, None, None], np.inf, terms * factor[:, None, None])
    # |computed| <= |out| + bound: the rounding of the error is charged to its sources.
    terms *= 1 + UNIT[arithmetic.out_dtype]
    terms[..., -1] = rounding(head.out, arithmetic.out_dtype)
    lse_terms = np.stack([head.lse_terms.get(name, zero[:, 0]) for name in SOURCES], axis=-1)
    lse_terms = np.where(np.isinf(factor)[:, None], np.inf, lse_terms * factor[:, None])
    lse_terms[..., -1] = U32 * np.abs(head.lse)
    # Rounding has variance ulp^2 / 12.
    sigma = np.sqrt(head.variance + head.stored / 12)
    budget = Budget(head.out, head.lse, head.magnitude, terms, sigma, head.bias, head.stored, lse_terms)
    blank = Budget.empty(1, head.v.shape[1])
    for field in fields(Budget):
        getattr(budget, field.name)[head.nothing] = getattr(blank, field.name)
    return budget


def decode_budget(inputs: Inputs, arithmetic: Arithmetic, orders: Sequence[Order] | None = None, **splits: int | None) -> Budget:
    """Bounds of a whole paged decode, leading shape `[batch_size, num_q_heads]`.

    `orders` has one order per request; without it, it is made from `num_splits` or `pages_per_split` and the
    tiles and states of `arithmetic`.
    """
    orders = default_orders(inputs, arithmetic, **splits) if orders is None else orders
    batch_size, num_q_heads, head_dim = inputs.q.shape
    parts = [Budget.empty(0, head_dim)]
    for b, order in enumerate(orders):
        for kv_head in range(inputs.num_kv_heads):
            q, k, v = inputs.head(b, kv_head)
            parts.append(head_budget(q, k, v, inputs.sm_scale, arithmetic, order))
    return Budget.combine(parts, (batch_size, num_q_heads))


def partial_budget(inputs: Inputs, arithmetic: Arithmetic, orders: Sequence[Order] | None = None, **splits: int | None) -> Budget:
    """Bounds of the partial states, leading shape `[batch_size, num_q_heads, num_splits]`.

    Arguments as for `decode_budget`. A request with fewer splits than another ends in empty ones.
    """
    arithmetic = replace(arithmetic, out_dtype=arithmetic.partial_dtype)
    orders = default_orders(inputs, arithmetic, **splits) if orders is None else orders
    batch_size, num_q_heads, head_dim = inputs.q.shape
    num_splits = max(map(len, orders), default=splits.get("num_splits") or 1)
    parts = [Budget.empty(0, head_dim)]
    for b, order in enumerate(orders):
        for kv_head in range(inputs.num_kv_heads):
            q, k, v = inputs.head(b, kv_head)
            states = []
            for split in [*order, *[[]] * (num_splits - len(order))]:
                tiles = [tile for state in split for tile in state]
                tokens = np.concatenate([np.asarray(tile) for tile in tiles]) if tiles else np.zeros(0, int)
                ends = np.cumsum([0, *map(len, tiles)]).tolist()
                local = iter(map(range, ends, ends[1:]))
                renumbered = [[next(local) for _ in state] for state in split]
                states.append(head_budget(q, k[tokens], v[tokens], inputs.sm_scale, arithmetic, [renumbered]))
            # [split, head] to [head, split]
            by_split = Budget.combine(states, (num_splits, len(q)))
            arrays = (np.moveaxis(getattr(by_split, field.name), 0, 1) for field in fields(Budget))
            parts.append(Budget(*(x.reshape(-1, *x.shape[2:]) for x in arrays)))
    return Budget.combine(parts, (batch_size, num_q_heads, num_splits))


def merge_budget(o: np.ndarray, lse: np.ndarray, arithmetic: Arithmetic) -> Budget:
    """Bounds of a merge of given states, `o [..., num_states, head_dim]` and natural `lse [..., num_states]`.

    A token is a state, (v, score): a merge is attention to the states with lse - max as scores. Of `arithmetic`, `merge` and its
    ways and batch, `ex2`, `lg2`, `division` and `out_dtype` matter. States of lse -inf are selected away.
    """
    # The difference, its product with log2(e) and that constant are rounded, as scores are; nothing else is.
    states = replace(arithmetic, dot="fma", dot_depth=0, pv="fma", p="float32", constant=1.0, lse_m=0.0)
    order = [merge_order(lse.shape[-1], arithmetic)]
    parts = [Budget.empty(0, o.shape[-1])]
    for o_row, lse_row in zip(o.reshape(-1, *o.shape[-2:]), lse.reshape(-1, lse.shape[-1]), strict=True):
        lse_row, absent = lse_row.astype(np.float64), np.isneginf(lse_row)
        top = 0.0 if absent.all() else lse_row.max()
        values = np.where(absent[:, None], 0, o_row.astype(np.float64))
        with np.errstate(invalid="ignore"):
            row = head_budget(np.ones((1, 1)), (lse_row - top)[:, None], values, 1.0, states, order)
        row.lse[:] += top
        row.lse_terms[:, -1] = np.where(absent.all(), 0, U32 * np.abs(row.lse))
        parts.append(row)
    return Budget.combine(parts, lse.shape[:-1])


def merge_order(num_states: int, arithmetic: Arithmetic) -> list[list[range]]:
    """The states of a merge as tokens of one split: each way a running state, each batch a tile, or each state if `online`."""
    a = arithmetic
    if a.merge_ways == 1 and a.merge == "max_first":
        return [[range(num_states)]]
    size = 1 if a.merge == "online" else a.merge_batch
    tiles = [range(i, min(i + size, num_states)) for i in range(0, num_states, size)]
    ways = [[tile for tile in tiles if a.merge_way(tile.start) == way] for way in range(a.merge_ways)]
    return [way for way in ways if way]


def default_orders(inputs: Inputs, arithmetic: Arithmetic, **splits: int | None) -> list[Order]:
    """One order per request: page-aligned splits walked in the tiles and states of `arithmetic`.

    All have as many splits as the request with the most: a kernel merges them all, or none.
    """
    requests = range(len(inputs.context_lens))
    orders = [tiled_order(inputs.splits(b, **splits), arithmetic.tile, arithmetic.states) for b in requests]
    most = max(map(len, orders), default=1)
    return [[*order, *[[]] * (most - len(order))] for order in orders]


def predict_rho(budget: Budget, arithmetic: Arithmetic, *, everything: bool = False) -> float:
    """RMS(error) / RMS(error of an ideally rounded output), predicted from the inputs.

    `rho^2 = 1 + sum omega_s^2 (ulp(o_s)^2 + ulp(lse_s)^2 (o_s - out)^2) / sum ulp(out)^2`: independent roundings
    of variance ulp^2 / 12, carried to the output by the merge weights omega_s. It holds while the error of a
    stored lse is small against 1. `everything` adds the other sources at the size their bounds allow, which
    overestimates them.
    """
    finite = np.isfinite(budget.stored) & np.isfinite(budget.out) & np.isfinite(budget.lse)[..., None]
    added = budget.stored
    if everything:
        added = 12 * (budget.sigma**2 + budget.bias**2)
    spacing = ulp(budget.out, arithmetic.out_dtype)
    return float(np.sqrt(1 + added[finite].sum() / (spacing[finite] ** 2).sum())) if finite.any() else 1.0
