"""What the comparator says: one verdict per tier, with the element that decided it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

TIERS = {
    "T0": "exact: bitwise equal where exact arithmetic is",
    "T0b": "bitwise: the same bits from every run",
    "T1": "proof: within the forward error bound, every element",
    "T2": "sigma: within rounding + 6 sigma, every element",
    "T3": "RMS: no more error than predicted, all elements together",
    "T3b": "bias: errors lean to neither side",
    "T4": "exact fraction: as often correctly rounded as this arithmetic is",
    "T5": "lse: within its bound",
    "T6": "partial states: each split's o and lse within their bounds",
    "T7": "non-finite: exactly the elements of the exact result",
    "T8": "ratchet: not worse than recorded",
    "T9": "peers: what other projects' tolerances say; reported only",
}


@dataclass(frozen=True)
class Worst:
    """The element that decides a verdict: both values in float64, and its bound by source, largest first."""

    index: tuple[int, ...]
    got: float
    want: float
    budget: dict[str, float]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.2e}" for name, value in list(self.budget.items())[:6])
        error = abs(self.got - self.want)
        place = ", ".join(map(str, self.index))
        total = sum(self.budget.values())
        return f"at [{place}]: got {self.got:.17g}, want {self.want:.17g}, error {error:.3e}, bound {total:.3e}" + (
            f" = {parts}" if parts else ""
        )


@dataclass(frozen=True)
class Verdict:
    """`verdict` is "pass", "fail" or "n/a"; `ratio` is measured / allowed, so at most 1 on a pass."""

    tier: str
    verdict: str
    ratio: float
    detail: str = ""
    worst: Worst | None = None

    def __str__(self) -> str:
        lines = [f"{self.tier:<4}{self.verdict:<5} ratio {self.ratio:<10.4g} {self.detail or TIERS[self.tier]}"]
        if self.worst is not None and self.verdict != "n/a":
            lines.append(f"         worst {self.worst}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """Verdicts by tier. `str()` is the text for people, `to_json()` for files."""

    verdicts: dict[str, Verdict]
    # what the ratchet records: "ratio" (max error / bound), "rho" and "inexact" (fraction not correctly rounded)
    measures: dict[str, float]

    @property
    def passed(self) -> bool:
        """No tier fails."""
        return all(v.verdict != "fail" for v in self.verdicts.values())

    def with_verdict(self, verdict: Verdict) -> Report:
        """Self and one more verdict (T0b, T8)."""
        return replace(self, verdicts={**self.verdicts, verdict.tier: verdict})

    def __str__(self) -> str:
        return "\n".join(map(str, self.verdicts.values()))

    def to_json(self) -> dict[str, object]:
        """The keys of a case in report.json: verdict, tiers, worst (of the first failing tier, or else of T1)."""
        failing = [v for v in self.verdicts.values() if v.verdict == "fail"]
        shown = [v.worst for v in [*failing, *self.verdicts.values()] if v.worst is not None]
        return {
            "verdict": "pass" if self.passed else "fail",
            "tiers": {v.tier: {"verdict": v.verdict, "ratio": v.ratio} for v in self.verdicts.values()},
            "worst": asdict(shown[0]) if shown else None,
        }
