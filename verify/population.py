"""The tiers that judge all elements together: RMS, bias and the fraction that is correctly rounded."""

from __future__ import annotations

import numpy as np

from .arithmetic import Arithmetic, ulp
from .budget import Budget, predict_rho
from .verdict import Verdict

# Elements below which RMS, bias and exact fraction say too little: at 1e4 their own noise is about 1 %.
ENOUGH = 10_000


class Population:
    """All finite elements of non-empty rows; `measures` is what the ratchet records of them."""

    def __init__(self, out: np.ndarray, got: np.ndarray, want: np.ndarray, budget: Budget, a: Arithmetic) -> None:
        self.a, self.budget = a, budget
        with np.errstate(over="ignore", invalid="ignore"):
            ideal = want.astype(out.dtype).astype(np.float64)
        used = np.isfinite(want) & np.isfinite(ideal) & np.isfinite(got) & ~np.isneginf(budget.lse)[..., None]
        self.used, self.rows = used, int(used.any(-1).sum())
        self.spacing = ulp(want[used], a.out_dtype)
        self.error, self.sign = got[used] - want[used], np.sign(want[used])
        self.rounding_error = ideal[used] - want[used]
        self.inexact = got[used] != ideal[used]
        self.far = np.abs(got[used] - ideal[used]) > self.spacing * (1 + 1e-12)
        # A few large elements rule an RMS: count the elements that carry it.
        squares = self.spacing**2
        self.count = float(squares.sum() ** 2 / (squares**2).sum()) if squares.size and np.isfinite(squares).all() else 0
        ideal_rms = np.sqrt((self.rounding_error**2).mean()) if used.any() else 0.0
        # Outputs that happen to be representable have no ideal error to compare with.
        rounds = used.any() and ideal_rms > 0.9 * np.sqrt(squares.mean() / 12)
        self.rho = float(np.sqrt((self.error**2).mean()) / ideal_rms) if rounds else float("nan")
        self.measures = {"inexact": float(self.inexact.mean()) if used.any() else 0.0}
        if rounds and self.count >= ENOUGH:
            self.measures["rho"] = self.rho

    def rms(self) -> Verdict:
        """T3: RMS(error) / RMS(ideal rounding error) against its prediction."""
        if np.isnan(self.rho):
            return Verdict("T3", "n/a", 0.0, "the exact outputs are representable")
        if self.count < ENOUGH:
            return Verdict("T3", "n/a", 0.0, f"{self.count:.0f} effective elements, {ENOUGH} needed")
        predicted = predict_rho(self.budget, self.a, everything=True)
        # Sampling noise of the RMS at 1e4 elements is below 1 %, twice that where P or partials add roundings.
        plain = self.a.p == "float32" and self.a.partial_dtype == self.a.lse_dtype == "float32"
        allowed = predicted * (1.02 if plain else 1.03)
        detail = f"rho {self.rho:.4f}, predicted {predicted:.4f}"
        return Verdict("T3", "pass" if self.rho <= allowed else "fail", self.rho / allowed, detail)

    def lean(self) -> Verdict:
        """T3b: mean((error - that of correct rounding) sign(out) / scale), within 5 standard deviations and the predicted drift.

        The scale is an ulp, or what the other errors amount to where that is more: outputs near 0 count like others.
        """
        count = len(self.error)
        if count < ENOUGH:
            return Verdict("T3b", "n/a", 0.0, f"{count} elements, {ENOUGH} needed")
        sigma, bias = self.budget.sigma[self.used], self.budget.bias[self.used]
        scale = np.sqrt(self.spacing**2 + 12 * sigma**2)
        # A rounding is independent per element; an error of l or of the merge is shared by a row.
        noise = 5 * np.sqrt(((self.spacing / scale) ** 2).mean() / (12 * count))
        noise += 5 * np.sqrt(((sigma / scale) ** 2).mean() / self.rows)
        drift = (bias / scale).mean()
        if not np.isfinite(noise + drift):
            return Verdict("T3b", "n/a", 0.0, "no bound to hold the mean against")
        # Correct rounding may lean by itself: subnormals towards 0, or outputs that all lie near one number.
        mean = float(((self.error - self.rounding_error) * self.sign / scale).mean())
        detail = f"mean error {mean:+.2e} ulp, {noise + drift:.2e} allowed"
        ratio = abs(mean) / (noise + drift)
        return Verdict("T3b", "pass" if ratio <= 1 else "fail", ratio, detail)

    def fraction(self, family: str | None) -> Verdict:
        """T4: bit-exact fraction on normal inputs; within one ulp wherever the bound promises it, on any."""
        promised = self.budget.before_rounding[self.used] < self.spacing / 2
        if (self.far & promised).any():
            return Verdict("T4", "fail", np.inf, f"{(self.far & promised).sum()} elements off by more than an ulp")
        stored = self.a.partial_dtype == self.a.lse_dtype == "float32"
        # For fp16 outputs, of P in float32 or two parts: 99.8 to 99.95 % on the CPU stand-in; of fp16 P in simulation: 63 %.
        least = {"float32": 0.997, "float16x2": 0.997, "bfloat16x3": 0.99, "float16": 0.55}.get(self.a.p)
        applies = family == "normal" and stored and self.a.out_dtype == "float16" and least is not None
        count = len(self.inexact)
        if not applies or least is None or count < ENOUGH:
            return Verdict("T4", "n/a", 0.0)
        # Five binomial standard deviations.
        allowed = 1 - least + 5 * np.sqrt(least * (1 - least) / count)
        detail = f"{1 - self.inexact.mean():.2%} correctly rounded, {1 - allowed:.2%} needed"
        ratio = float(self.inexact.mean() / allowed)
        return Verdict("T4", "pass" if ratio <= 1 else "fail", ratio, detail)
