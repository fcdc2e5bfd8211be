"""report.json and report.html: what was found, in a form for programs and one for people."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).with_name("templates")
# Of report.json, in this order; anything else comes after.
KEYS = ("verdict", "environment", "cases", "mutants", "experiments")
CASE_TIERS = ("T0", "T0b", "T1", "T2", "T5", "T6", "T7")
POOL_TIERS = ("T3", "T3b", "T4", "T8")


@dataclass(frozen=True)
class Section:
    """One experiment of the report. Rows are cells as text, numbers already formatted; a figure is one <svg> element."""

    title: str
    summary: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    # from verify.pictures.to_svg
    figure_svg: str = ""
    # False makes the whole report fail
    passed: bool = True
    # further paragraphs
    notes: Sequence[str] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """All but the picture."""
        return {
            "title": self.title, "summary": self.summary, "columns": list(self.columns), "rows": [list(row) for row in self.rows],
            "passed": self.passed, "notes": list(self.notes),
        }  # fmt: skip


def assemble(
    environment: dict[str, Any],
    cases: list[dict[str, Any]],
    pools: list[dict[str, Any]],
    mutants: list[dict[str, Any]],
    sections: Sequence[Section],
    **more: Any,
) -> dict[str, Any]:
    """The contents of report.json. A mutant that survives, or a healthy change that does not, is a failure as any other."""
    failed = [row["name"] for row in [*cases, *pools] if row["verdict"] != "pass"]
    failed += [f"mutant {mutant['name']}" for mutant in mutants if not mutant_as_expected(mutant)]
    failed += [section.title for section in sections if not section.passed]
    return {
        "verdict": "fail" if failed or not cases else "pass",
        "environment": environment,
        "cases": cases,
        "mutants": mutants,
        "experiments": [section.to_json() for section in sections],
        "pools": pools,
        "failed": list(dict.fromkeys(failed)),
        "outputs": sum(row["errors"].get("elements", 0) for row in cases),
        "largest_ratio": max(map(ratio, cases), default=0.0),
        **more,
    }


def mutant_as_expected(mutant: dict[str, Any]) -> bool:
    """As its own verdict says; without one, killed by two tiers or two families, and by none if `"healthy"` is true."""
    if "verdict" in mutant:
        return mutant["verdict"] in ("killed", "clean")
    killers = mutant["killed_by"]
    if mutant.get("healthy"):
        return not killers
    return len({tier for tier, _ in killers}) >= 2 or len({family for _, family in killers}) >= 2


def last_line(report: dict[str, Any]) -> str:
    """The verdict in one line, with what it rests on and what was not run."""
    cases, mutants = report["cases"], report["mutants"]
    on = f"on {report['environment']['device']}"
    on += ", no GPU here" if report.get("no_gpu") else ""
    on += f"; not run: {', '.join(report['skipped'])}" if report.get("skipped") else ""
    if report["verdict"] == "fail":
        names, checks = report["failed"], len(cases) + len(report["pools"]) + len(mutants) + len(report["experiments"])
        shown = f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "nothing was run"
        return f"FAIL: {len(names)} of {checks} checks: {shown}; {on}"
    worst = max(cases, key=ratio)
    killed = f", {sum(not m.get('healthy') for m in mutants)} mutants killed" if mutants else ""
    found = f"{len(cases)} cases, {report['outputs']:,} outputs, largest error {ratio(worst):.3f} of its bound ({worst['name']})"
    return f"PASS: {found}{killed}; {on}"


def ratio(row: dict[str, Any]) -> float:
    """Largest error of a case against its bound; infinite where it could not even be judged."""
    return float(row["tiers"].get("T1", {"ratio": math.inf})["ratio"])


def save(report: dict[str, Any], sections: Sequence[Section], folder: Path) -> list[Path]:
    """Writes report.json and, where Jinja2 and Matplotlib are installed, report.html. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.json"]
    # For machines, thousands of cases: one line.
    paths[0].write_text(json.dumps(plain(report), allow_nan=False) + "\n")
    try:
        html = render(report, sections)
    except ModuleNotFoundError as error:
        # A stale page would speak of another run.
        (folder / "report.html").unlink(missing_ok=True)
        if error.name not in ("jinja2", "matplotlib"):
            raise
        return paths
    paths.append(folder / "report.html")
    paths[1].write_text(html, encoding="utf-8")
    return paths


def plain(x: Any) -> Any:
    """What JSON can hold: NumPy scalars as numbers, tuples as lists, and NaN and infinities as "nan", "inf", "-inf"."""
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if hasattr(x, "item"):
        x = x.item()
    return x if not isinstance(x, float) or math.isfinite(x) else str(x)


def render(report: dict[str, Any], sections: Sequence[Section]) -> str:
    """report.html, one file without references to others."""
    import jinja2

    from . import pictures
    from .budget import SOURCES
    from .verdict import TIERS

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        error=error, fixed=fixed, percent=lambda x: f"{x:.2%}", grouped=lambda x: f"{x:,}", case_ratio=ratio
    )
    # RMS and the correctly rounded fraction are what this table is for; the rest is folded.
    counts = lambda tiers: any(tiers.get(tier, {}).get("verdict", "n/a") != "n/a" for tier in ("T3", "T4"))
    environment.tests.update(expected_mutant=mutant_as_expected, judged=counts)
    shown = worst_seeds(report["cases"])
    by_list: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in shown:
        by_list[row["list"]].append(row)
    return environment.get_template("report.html.j2").render(
        report=report,
        sections=sections,
        sentence=last_line(report).partition(": ")[2],
        lists=by_list,
        failures=[row for row in [*shown, *report["pools"]] if row["verdict"] != "pass"],
        tiers=TIERS,
        tier_rows=tier_rows([*report["cases"], *report["pools"]], TIERS),
        case_tiers=CASE_TIERS,
        pool_tiers=POOL_TIERS,
        sources=SOURCES,
        colours=pictures.COLOURS,
        peers=peer_rows(report["cases"]),
        budget_svg=pictures.budget_bars(worst_of_families(shown)),
        matrix=matrix(report["mutants"], list(TIERS)),
        as_expected=mutant_as_expected,
    )


def tier_rows(rows: list[dict[str, Any]], tiers: dict[str, str]) -> list[dict[str, Any]]:
    """Per tier what it asks, how many rows it judged and failed, and the largest ratio."""
    found = []
    for tier, asks in tiers.items():
        entries = [row["tiers"][tier] for row in rows if row["tiers"].get(tier, {"verdict": "n/a"})["verdict"] != "n/a"]
        failed = sum(entry["verdict"] == "fail" for entry in entries)
        largest = max((float(entry["ratio"]) for entry in entries), default=0.0)
        found.append({"tier": tier, "asks": asks, "judged": len(entries), "failed": failed, "largest": largest})
    return found


def peer_rows(rows: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """T9: each habit of other projects, how many cases it was asked about, and how many it accepts."""
    asked: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        for habit, accepts in row.get("peers", {}).items():
            asked[habit].append(accepts)
    return [(habit, len(verdicts), sum(verdicts)) for habit, verdicts in asked.items()]


def worst_seeds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per case: the seed that failed or came closest, with the number of seeds and their outputs."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_name[row["name"]].append(row)
    worst = lambda same: max(same, key=lambda row: (row["verdict"] != "pass", ratio(row)))
    return [{**worst(same), "seeds": len(same)} for same in by_name.values()]


def worst_of_families(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The case of each family whose worst element came closest to its bound, closest first; only families with an error."""
    by_family: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=ratio):
        if row["worst"] and 0 < sum(row["worst"]["budget"].values()) < math.inf and 0 < ratio(row) < math.inf:
            by_family[row["family"]] = row
    return sorted(by_family.values(), key=ratio, reverse=True)


def matrix(mutants: list[dict[str, Any]], tiers: list[str]) -> dict[str, Any]:
    """The mutants against the tiers that kill any of them: in how many families each does."""
    used = [tier for tier in tiers if any(tier == killer for mutant in mutants for killer, _ in mutant["killed_by"])]
    rows = []
    for mutant in mutants:
        families: dict[str, set[str]] = defaultdict(set)
        for tier, family in mutant["killed_by"]:
            families[tier].add(family)
        rows.append(
            {**mutant, "by_tier": {tier: sorted(families[tier]) for tier in used}, "families": set().union(*families.values())}
        )
    return {"tiers": used, "rows": rows}


def error(x: Any) -> str:
    """An error: always with an exponent, so that a column lines up."""
    return x if isinstance(x, str) else "" if x is None else "0" if x == 0 else f"{x:.1e}"


def fixed(x: Any) -> str:
    """A ratio near 1: three decimals, fewer if it is far beyond."""
    return x if isinstance(x, str) else "" if x is None else f"{x:.3f}" if abs(x) < 100 else f"{x:.3g}"
