"""What a run shows while it goes on and after it: progress, a line per case, the failures, and one last honest line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

# Piped output has no width of its own: wide enough for a line per case.
WIDTH = 150
STYLES = {"pass": "green", "fail": "bold red"}


def console() -> Console:
    """Standard output, never narrower than the tables when it is no terminal."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=WIDTH)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere; yields what to call after each step. None: as many steps as there will be."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def figure(x: float | None) -> str:
    """A number in a column: three digits, 0 as 0."""
    return "" if x is None else "0" if x == 0 else f"{x:.2e}" if x < 1e-3 or x >= 1e4 else f"{x:.3g}"


def cases_table(rows: list[dict[str, Any]]) -> Table:
    """One line per case: its errors, in every unit that people ask for."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("case", no_wrap=True)
    for name in ("family", "schedule", "dtype", "seed"):
        table.add_column(name, no_wrap=True, style="dim")
    for name in ("max error", "roundoffs", "/ sum p|v|", "lse error", "non-finite", "error/bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        e = row["errors"]
        ratio = row["tiers"].get("T1", {}).get("ratio")
        table.add_row(
            row["name"], row["family"], row["schedule"], row["dtype"], str(row["seed"]), figure(e.get("max_abs")),
            figure(e.get("roundoffs")), figure(e.get("of_sum_p_v")), figure(e.get("lse")), str(e.get("non_finite", "")),
            figure(ratio), f"[{STYLES[row['verdict']]}]{row['verdict']}[/]",
        )  # fmt: skip
    return table


def pools_table(rows: list[dict[str, Any]]) -> Table:
    """One line per pool: the tiers that need ten thousand elements."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("all elements of", no_wrap=True)
    for name in ("elements", "correctly rounded", "rho", "T3", "T3b", "T4", "T8"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        measures, tiers = row["measures"], row["tiers"]
        shown = [
            figure(tiers[t]["ratio"]) if tiers.get(t, {}).get("verdict", "n/a") != "n/a" else "-"
            for t in ("T3", "T3b", "T4", "T8")
        ]
        table.add_row(
            row["name"], f"{row['elements']:,}", f"{1 - measures['inexact']:.2%}", figure(measures.get("rho")) or "-", *shown,
            f"[{STYLES[row['verdict']]}]{row['verdict']}[/]",
        )  # fmt: skip
    return table


def write(out: Console, report: dict[str, Any]) -> None:
    """The tables, then what failed with everything known about it."""
    out.print(cases_table(report["cases"]))
    if any(tier["verdict"] != "n/a" for row in report["pools"] for tier in row["tiers"].values()):
        out.print()
        out.print(pools_table(report["pools"]))
    for row in [*report["cases"], *report["pools"]]:
        if row["verdict"] == "fail":
            out.print(f"\n[bold red]{row['name']}[/] {row.get('reproduce', '')}")
            out.print(row.get("case", ""), row["text"], sep="\n", markup=False, soft_wrap=True)
