"""The sources of error for the query heads of one KV head; `verify.budget` has the formula they share.

Axes: g query head of the group, j token in the kernel's order, s split, d element of the head.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from .accumulation import Layout, Running, accumulate
from .arithmetic import P_ERROR, U32, Arithmetic, rounding, ulp

LN2 = math.log(2)
Terms = dict[str, np.ndarray]


def sum_of(terms: Terms) -> np.ndarray:
    """All sources together."""
    return np.sum(list(terms.values()), axis=0)


class HeadTerms:
    """First-order bounds `terms[source] [g, d]` and `lse_terms[source] [g]`, with their statistics.

    `out`, `lse`, `magnitude` (sum pi |v|) are exact; `variance [g, d]` is that of the independent part before the
    final rounding and without stored partials, `bias [g, d]` the size of the rest, `stored [g, d]` the weighted
    squared ulps of stored partials; `nothing [g]` marks heads whose scores are all -inf. `ways` has the running sum of the merge
    that takes each split; None: there is no merge.
    """

    def __init__(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        sm_scale: float,
        arithmetic: Arithmetic,
        layout: Layout,
        ways: list[int] | None,
    ) -> None:
        self.arithmetic, self.layout, self.v = arithmetic, layout, v
        self.s = sm_scale * (q @ k.T)
        products = abs(sm_scale) * (np.abs(q) @ np.abs(k).T)
        self.dot_error = arithmetic.dot_error(q.shape[1]) * products
        # Kernels are compiled with -ftz=true, which CuPy always adds: q, K and products below 2^-126 count as 0.
        self.flushed = abs(sm_scale) * (np.abs(q).sum(1)[:, None] + np.abs(k).sum(1) + q.shape[1]) * 2.0**-126
        self.hidden = self.s == -np.inf
        m = self.s.max(axis=1, keepdims=True)
        p = np.exp(self.s - np.where(m == -np.inf, 0, m))
        l = p.sum(axis=1, keepdims=True)
        self.nothing = (l == 0)[:, 0]
        self.pi = p / np.where(l == 0, 1, l)
        self.out, self.magnitude = self.pi @ v, self.pi @ np.abs(v)
        self.lse = (m + np.log(l))[:, 0]
        self.size = np.abs(self.out)
        self.variance, self.bias, self.stored = (np.zeros_like(self.out) for _ in range(3))
        running = layout.running_maximum(self.s, self._score_noise(), arithmetic.lazy * LN2)
        self.terms, self.lse_terms = self._weights(running)
        self._p_round(running)
        self._sums(running)
        self._splits(ways)
        # V, products, sums and stored o below 2^-126, each flushed once; l >= 1, so 2^-126 is their cost in the output.
        self.terms["flush"] += 4 * (len(v) + layout.shares * len(layout.split_starts)) * 2.0**-126
        # What is flushed goes to 0 every time.
        self.bias += self.terms["flush"] + self.terms["underflow"]

    def visible(self, x: np.ndarray) -> np.ndarray:
        """x, but 0 for tokens of score -inf: they have no weight, whatever the error of that score."""
        return np.where(self.hidden, 0, x)

    def _score_noise(self) -> np.ndarray:
        """Twice how far a computed score may be from the exact one, per head: closer maxima may swap."""
        noise = self.dot_error + self.flushed
        if self.arithmetic.score == "scaled":
            noise = noise + (self.arithmetic.constant + 1) * U32 * np.abs(self.s)
        return 2 * np.max(self.visible(noise), axis=1)

    def _weights(self, running: Running) -> tuple[Terms, Terms]:
        """Relative errors delta of the weights: `sum pi delta |v - out|`, and `sum pi delta` for the lse."""
        a, s = self.arithmetic, self.s
        argument = a.argument_roundings * U32
        size = self.visible(np.abs(s))
        from_mean = s - (self.pi * self.visible(s)).sum(1, keepdims=True)
        # How far a score may be from the maximum in use.
        away = np.maximum(np.abs(s - running.tokens), np.abs(s - running.low))
        delta = {
            "qk_dot": self.dot_error,
            "flush": self.flushed,
            # One number for all tokens: what it does to their mean score cancels.
            "scale_const": a.constant * U32 * np.abs(from_mean),
            "score_mul": U32 * (size if a.score == "scaled" else away),
            "score_sub": U32 * away,
            # ex2(0) = 1 exactly.
            "ex2": np.where(running.sure_maximum, 0, a.ex2 * U32),
            # The arguments of successive rescales telescope.
            "rescale_w": a.ex2 * U32 * running.later_changes + argument * np.abs(running.state_final - running.low),
        }
        if levels := a.merging(self.layout.most_states, self.layout.shares)[0]:
            delta["state_merge"] = levels * a.ex2 * U32 + argument * np.abs(running.split_final - running.state_low)
        delta = {name: self.visible(row) for name, row in delta.items()}
        # exp(e) - 1 <= e exp(e), the sum of all exponents' errors; without bound beyond e^700.
        grown = self.pi * np.exp(np.minimum(sum_of(delta), 700))
        rows = {name: grown * row for name, row in delta.items()}
        # A weight this far below the maximum may be flushed to 0 in one of its factors.
        lost = s < s.max(1, keepdims=True) + math.log(len(self.v)) + 1 - 126 * LN2
        rows["underflow"] = np.where(lost, self.pi, 0)

        independent = sum(rows[name] ** 2 for name in ("score_mul", "score_sub", "ex2"))
        if a.dot == "fma":
            independent = independent + rows["qk_dot"] ** 2
        stacked, terms = np.stack(list(rows.values()), axis=1), []
        for g, out in enumerate(self.out):
            from_out = self.v - out
            terms.append(stacked[g] @ np.abs(from_out))
            # An error uniform in [-w, w] has variance w^2 / 3.
            self.variance[g] += independent[g] @ from_out**2 / 3
            self.bias[g] += a.constant * U32 * np.abs((self.pi[g] * self.visible(from_mean)[g]) @ from_out)
        summed = {name: row.sum(1) for name, row in rows.items()}
        # The lse sees the constant's effect on the mean score as well.
        summed["scale_const"] = a.constant * U32 * (grown * size).sum(1)
        named = dict(zip(rows, np.stack(terms, axis=1), strict=True))
        # Truncating dot products err to one side.
        self.bias += named["qk_dot"] if a.dot == "mma" else 0
        return named, summed

    def _p_round(self, running: Running) -> None:
        """P in fewer bits. In l as well it is one more error of the weights; in acc alone nothing cancels."""
        a = self.arithmetic
        relative, absolute = P_ERROR[a.p]
        if relative == 0:
            return
        # pi_j / p_j times the absolute error of the stored p_j, which is never more than p_j itself.
        floor = absolute * 2.0**-a.p_shift * np.exp(running.tokens - self.lse[:, None])
        row = np.minimum(self.pi, np.maximum(relative * self.pi, self.visible(floor)))
        values = [self.v - out if a.l_from_p else self.v for out in self.out]
        self.terms["p_round"] = np.stack([w @ np.abs(x) for w, x in zip(row, values, strict=True)])
        self.variance += np.stack([w**2 @ x**2 / 3 for w, x in zip(row, values, strict=True)])
        if a.l_from_p:
            self.lse_terms["p_round"] = row.sum(1)

    def _sums(self, running: Running) -> None:
        """Accumulation of acc and l, their rescaling, and the merge of running states inside a split."""
        a, layout = self.arithmetic, self.layout
        acc = accumulate(a, self.pi, self.v, self.out, layout, running)
        self.terms["pv_acc"] = acc.bound
        changed = self.pi * running.later_changes
        self.terms["rescale_mul"] = U32 * (changed @ np.abs(self.v) + changed.sum(1)[:, None] * self.size)
        self.lse_terms["rescale_mul"] = U32 * changed.sum(1)
        # A term of l meets the tree or chain of its tile, then one addition per tile. An error of l_s scales o_s and
        # exp(lse_s) inversely: the merge undoes it in the numerator, and |out| instead of sum omega_s |o_s| pays.
        in_tile = math.ceil(math.log2(layout.longest_tile)) if a.l_sum == "tree" else layout.longest_tile - 1
        # Lanes: two additions a tile, 3 in the tree of 8 lanes, and one for the parts of P.
        depth = 2 * layout.most_tiles + 4 if a.l_sum == "lanes" else layout.most_tiles + in_tile
        self.terms["l_acc"] = depth * U32 * self.size
        self.lse_terms["l_acc"] = np.full(len(self.out), depth * U32)
        self.variance += acc.variance + depth * (U32 * self.out) ** 2 / 3
        self.bias += acc.bias
        if roundings := a.merging(layout.most_states, layout.shares)[1]:
            # Multiplications and additions, of acc and of l.
            self.terms["state_merge"] += roundings * U32 * (self.magnitude + self.size)
            self.lse_terms["state_merge"] += roundings * U32
            # The exponential of a state is shared by its tokens: no averaging inside it.
            shared = (self.terms["state_merge"] ** 2) / 3
            self.variance += shared

    def _splits(self, ways: list[int] | None) -> None:
        """The end of each split, the stored partial states, and their merge."""
        a, cuts = self.arithmetic, [*self.layout.split_starts, len(self.v)]
        m = np.maximum.reduceat(self.s, cuts[:-1], axis=1)
        m = np.where(m == -np.inf, 0, m)
        p = np.exp(self.s - np.repeat(m, np.diff(cuts), axis=1))
        l = np.add.reduceat(p, cuts[:-1], axis=1)
        none, l = l == 0, np.where(l == 0, 1, l)
        o = np.stack([p[:, i:j] @ self.v[i:j] for i, j in pairwise(cuts)]) / l.T[:, :, None]
        log_l = np.log(l)
        lse = m + log_l
        omega = np.where(none, 0, np.exp(lse - np.where(self.nothing, 0, self.lse)[:, None]))
        # omega_s |o_s|, summed: what each operation on the partial o acts upon.
        weight = omega.T[:, :, None]
        size = (weight * np.abs(o)).sum(0)
        self.terms["norm"] = a.division * U32 * size
        self.variance += ((a.division * U32 * weight * o) ** 2).sum(0) / 3
        calc = self._log_error(m, log_l)
        if ways is None:
            self.lse_terms["lse_calc"] = (omega * calc).sum(1)
            return

        # An error of a stored lse is a relative error of its split's weight: u |lse_s|.
        top = np.where(none, -np.inf, lse).max(1, keepdims=True)
        errors = {
            "lse_calc": calc + U32 * np.abs(lse),
            # The difference, its product with log2(e), and that constant are rounded.
            "merge_w": 3 * U32 * np.abs(lse - top) + a.ex2 * U32,
        }
        if a.lse_dtype != "float32":
            errors["lse_store"] = rounding(lse, a.lse_dtype)
        rises, of_way = np.zeros_like(lse), [np.flatnonzero(np.equal(ways, way)) for way in sorted(set(ways))]
        if a.merge == "online" and lse.shape[1] > 1:
            # A later state rescales if it may be above the maximum so far, given the errors of both.
            noise = 2 * (sum_of(self.lse_terms)[:, None] + sum_of(errors))
            noise = noise.max(1, keepdims=True)
            for way in of_way:
                own = np.where(none, -np.inf, lse)[:, way]
                rise = own[:, 1:] > np.maximum.accumulate(own, axis=1)[:, :-1] - noise
                rises[:, way[:-1]] = np.cumsum(rise[:, ::-1], axis=1)[:, ::-1]
            # The weights of the ways' sums: their maxima are all one where that comes first.
            errors["merge_w"] += a.ex2 * U32 * (rises + (len(of_way) > 1))
        distance = np.abs(o - self.out)
        for name, error in errors.items():
            error = omega * error * np.exp(np.minimum(error, 700))
            row = error.T[:, :, None] * distance
            self.terms[name], self.lse_terms[name] = row.sum(0), error.sum(1)
            # Storage has its variance in `stored`.
            self.variance += (row**2).sum(0) / 3 * (name != "lse_store")
        if a.partial_dtype != "float32":
            self.terms["o_store"] = (weight * rounding(o, a.partial_dtype)).sum(0)
            self.stored += ((weight * ulp(o, a.partial_dtype)) ** 2).sum(0)
        if a.lse_dtype != "float32":
            self.stored += (((omega * ulp(lse, a.lse_dtype)).T[:, :, None] * distance) ** 2).sum(0)
        # S products and S - 1 additions in acc, S - 1 in the denominator, one division; online, a rescale a rise. S is that of
        # the way with most states, and one more for each way where there are several.
        count = np.max([(~none[:, way]).sum(1) for way in of_way], axis=0) + len(of_way) * (len(of_way) > 1)
        rescaled = U32 * (omega * rises).T[:, :, None]
        self.terms["merge_acc"] = U32 * (count[:, None] * size + (count[:, None] - 1 + a.division) * self.size)
        self.terms["merge_acc"] += (rescaled * (np.abs(o) + self.size)).sum(0)
        self.variance += count[:, None] * U32**2 * (size**2 + self.out**2) / 3
        highest = np.where(self.nothing, 0, top[:, 0])
        last = self._log_error(highest, self.lse - highest)
        self.lse_terms["merge_acc"] = (count - 1) * U32 + U32 * (omega * rises).sum(1) + last

    def _log_error(self, m: np.ndarray, log_l: np.ndarray) -> np.ndarray:
        """Error of `m + log(l)`, natural, before its final rounding.

        lg2; m * ln2 where it is not compensated; the product log2(l) * ln2, its sum, and that ln2 as one float. A bare maximum
        is scaled to a pair of floats on the way: one sum more. l is larger where the maximum is lazy.
        """
        a = self.arithmetic
        size = np.abs(log_l) + a.lazy * LN2
        lg2 = LN2 * a.lg2 * U32 * np.maximum(1, size / LN2)
        return lg2 + U32 * (a.lse_m * np.abs(m) + (1.25 + a.argument_roundings) * size)
