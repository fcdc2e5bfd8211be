"""What a run leaves: bench.json, bench.csv, bench.png, and its lines on the terminal."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import SWEEP_CASES

Row = dict[str, Any]
COLUMNS = (
    "case", "kv_bytes", "us", "read_us", "floor_share", "apart_us", "host_us", "exact_fraction", "rho", "path", "spread", "error",
)  # fmt: skip
HEADER = f"{'case':<13}{'MB':>7}{'us':>9}{'read':>9}{'share':>8}{'apart':>9}{'host':>7}{'exact':>9}{'rho':>8}  best paged peer"
CONTIGUOUS = "contiguous"
# Splits of FACTS' table; 1 is unsplit.
SHOWN_SPLITS = ("1", "4", "16", "64")


def best_paged(row: Row) -> tuple[str, float] | None:
    """Name and microseconds of the fastest peer that reads pages."""
    paged = {name: us for name, us in row["peers"].items() if CONTIGUOUS not in name}
    return min(paged.items(), key=lambda item: item[1]) if paged else None


def line(row: Row) -> str:
    """One row, as wide as HEADER."""
    if row["us"] is None:
        return f"{row['case']:<13}{row['kv_bytes'] / 1e6:>7.0f}  {row.get('error', 'not timed')}"
    text = f"{row['case']:<13}{row['kv_bytes'] / 1e6:>7.0f}{row['us']:>9.2f}{row['read_us']:>9.2f}{row['floor_share']:>8.1%}"
    text += f"{row['apart_us']:>9.2f}" if "apart_us" in row else f"{'-':>9}"
    text += f"{row['host_us']:>7.1f}"
    text += f"{row['exact_fraction']:>9.2%}{row['rho']:>8.4f}" if row["rho"] is not None else f"{'-':>9}{'-':>8}"
    if peer := best_paged(row):
        text += f"  {peer[0]} {peer[1]:.2f} = {peer[1] / row['us']:.3f} x"
    return text + (f"  ERROR {row['error']}" if "error" in row else "")


def tables(result: dict[str, Any]) -> str:
    """Everything there is to show, as text."""
    rows, blocks = result["rows"], []
    if timed := [row for row in rows if row["us"] is not None or "error" in row]:
        blocks.append("\n".join([HEADER, *map(line, timed)]))
    blocks += [text for text in (peers_table(rows), sweep_table(rows), split_table(rows)) if text]
    if context := result.get("context"):
        blocks.append(context_table(context))
    return "\n\n".join(blocks)


def peers_table(rows: list[Row]) -> str:
    """Microseconds of every peer, a line a case; then accuracy and host time, a line a peer; then what failed."""
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    lines = [f"{'us':<13}{'ours':>9}" + "".join(f"{name[-22:]:>24}" for name in names)] if names else []
    for row in rows:
        if row["peers"]:
            cells = [f"{row['peers'][name]:.2f}" if name in row["peers"] else "-" for name in names]
            lines.append(f"{row['case']:<13}{row['us']:>9.2f}" + "".join(f"{cell:>24}" for cell in cells))
    for name in names:
        host = [row["peers_host_us"][name] for row in rows if name in row.get("peers_host_us", {})]
        found = [row["peers_accuracy"][name] for row in rows if name in row.get("peers_accuracy", {})]
        text = f"{name:<24} host {min(host):.1f} to {max(host):.1f} us"
        if found:
            exact, rho = ([one[key] for one in found] for key in ("exact_fraction", "rho"))
            text += f", exact {min(exact):.1%} to {max(exact):.1%}, rho {min(rho):.3f} to {max(rho):.3f}"
        lines.append(text)
    for row in rows:
        lines += [f"{row['case']:<13} {name}: {text}" for name, text in row.get("peers_errors", {}).items()]
    return "\n".join(lines)


def sweep_table(rows: list[Row]) -> str:
    """Microseconds of every split count; * is what plan_splits chooses, auto what a call without a choice takes."""
    swept = [row for row in rows if row.get("sweep_us")]
    if not swept:
        return ""
    splits = sorted({int(s) for row in swept for s in row["sweep_us"]})
    lines = [f"{'us / splits':<13}" + "".join(f"{s:>9}" for s in splits) + f"{'auto':>9}{'best/auto':>11}"]
    for row in swept:
        cells = [_cell(row, s) for s in splits]
        best = min(row["sweep_us"].values())
        lines.append(
            f"{row['case']:<13}" + "".join(f"{c:>9}" for c in cells) + f"{row['auto_us']:>9.1f}{best / row['auto_us']:>11.3f}"
        )
    return "\n".join(lines)


def _cell(row: Row, splits: int) -> str:
    us = row["sweep_us"].get(str(splits))
    return "-" if us is None else f"{us:.1f}{'*' if splits == row['planned_splits'] else ''}"


def split_table(rows: list[Row]) -> str:
    """The table of three batches at 1, 4, 16 and 64 splits, in Markdown."""
    swept = {row["case"]: row for row in rows if row.get("sweep_us")}
    if not set(SWEEP_CASES) <= set(swept):
        return ""
    lines = ["| B x context | unsplit | 4 | 16 | 64 splits | plan_splits |", "|---|---|---|---|---|---|"]
    for name in SWEEP_CASES:
        row = swept[name]
        cells = [_cell(row, int(s)) for s in SHOWN_SPLITS]
        lines.append(f"| {name.replace('x', ' x ')} | {' | '.join(cells)} | {row['planned_splits']} |")
    return "\n".join(lines)


def context_table(context: dict[str, Any]) -> str:
    """Time against context, and the two lines."""
    lines = [f"{'tokens':>9}{'us':>10}{'read':>10}{'share':>8}{'off line':>10}"]
    for point in context["points"]:
        fitted = context["start_us"] + context["slope_us"] * point["tokens"] / 1024
        lines.append(
            f"{point['tokens']:>9}{point['us']:>10.1f}{point['read_us']:>10.1f}{point['read_us'] / point['us']:>8.1%}"
            f"{point['us'] / fitted - 1:>10.1%}"
        )
    return "\n".join([
        *lines,
        f"us = {context['start_us']:.2f} + {context['slope_us']:.4f} per 1024 tokens, every point within {context['off']:.1%}; "
        f"slope {context['slope_ratio']:.3f} x the floor's",
    ])  # fmt: skip


def write(result: dict[str, Any], folder: Path) -> list[Path]:
    """bench.json, bench.csv and, with matplotlib, bench.png in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "bench.json", folder / "bench.csv"]
    written[0].write_text(json.dumps(_finite(result), indent=1, default=float) + "\n")
    peers = list(dict.fromkeys(name for row in result["rows"] for name in row["peers"]))
    with written[1].open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*COLUMNS, *peers])
        for row in result["rows"]:
            table.writerow([*(row.get(name) for name in COLUMNS), *(row["peers"].get(name) for name in peers)])
    try:
        written.append(picture(result, folder / "bench.png"))
    except ImportError:
        pass
    return written


def _finite(value: Any) -> Any:
    """The value without NaN and infinities, which JSON has no words for: None in their place."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def picture(result: dict[str, Any], path: Path) -> Path:
    """Time against splits, share of the floor with the peers beside, time against context: what there is of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawings: list[tuple[Callable[[Any, Any], None], Any, int]] = [
        (_draw_sweep, [row for row in result["rows"] if row.get("sweep_us")], 5),
        (_draw_shares, [row for row in result["rows"] if row["us"] is not None], 10),
        (_draw_context, result.get("context"), 5),
    ]
    panels = [(draw, data, width) for draw, data, width in drawings if data]
    figure = Figure(figsize=(sum(width for *_, width in panels) or 5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    if panels:
        all_axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=[width for *_, width in panels])[0]
        for axes, (draw, data, _) in zip(all_axes, panels, strict=True):
            draw(axes, data)
    where = result["environment"]
    figure.suptitle(f"{where.get('device')}, CUDA {where.get('cuda')}, CuPy {where.get('cupy')}, {str(where.get('date'))[:10]}")
    figure.savefig(path, dpi=110)
    return path


def _draw_sweep(axes: Any, rows: list[Row]) -> None:
    for n, row in enumerate(rows):
        splits = sorted(map(int, row["sweep_us"]))
        axes.plot(splits, [row["sweep_us"][str(s)] for s in splits], ".-", color=f"C{n}", label=row["case"])
        planned = str(row["planned_splits"])
        if planned in row["sweep_us"]:
            axes.plot(int(planned), row["sweep_us"][planned], "o", ms=10, mfc="none", color=f"C{n}")
        axes.axhline(row["auto_us"], color=f"C{n}", lw=0.6, ls=":")
    axes.set(xscale="log", yscale="log", xlabel="splits", ylabel="µs a call", title="two launches (○ plan_splits, ⋯ automatic)")
    axes.set_xticks(ticks := sorted({int(s) for row in rows for s in row["sweep_us"]}), map(str, ticks))
    _plain_numbers(axes)


def _draw_shares(axes: Any, rows: list[Row]) -> None:
    names = ["this project", *dict.fromkeys(name for row in rows for name in row["peers"])]
    width = 0.84 / len(names)
    for n, name in enumerate(names):
        times = [row["us"] if n == 0 else row["peers"].get(name, math.nan) for row in rows]
        shares = [100 * row["read_us"] / us for row, us in zip(rows, times, strict=True)]
        places = [i - 0.42 + (n + 0.5) * width for i in range(len(rows))]
        axes.bar(places, shares, width, label=name, color="black" if n == 0 else f"C{n - 1}")
        if n == 0:
            apart = [100 * row["read_us"] / row.get("apart_us", math.nan) for row in rows]
            axes.plot(places, apart, "_", ms=90 * width, mew=1.5, color="white")
    axes.axhline(100, color="grey", lw=0.6)
    axes.set_xticks(range(len(rows)), [row["case"] for row in rows], rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="% of the read floor", ylim=(0, 118), title="share of the read floor (higher is faster; white: apart)")
    axes.legend(frameon=False, fontsize=7, ncols=min(4, len(names)), loc="upper left")


def _draw_context(axes: Any, context: dict[str, Any]) -> None:
    tokens = [point["tokens"] for point in context["points"]]
    for key, start, slope, label, style in (
        ("us", "start_us", "slope_us", "this project", "ko"), ("read_us", "read_start_us", "read_slope_us", "read floor", "C0s"),
    ):  # fmt: skip
        axes.plot(tokens, [point[key] for point in context["points"]], style, ms=4, label=label)
        axes.plot(tokens, [context[start] + context[slope] * t / 1024 for t in tokens], style[:-1] + "-", lw=0.8)
    axes.set(
        xscale="log", yscale="log", xlabel="tokens of context", ylabel="µs a call", title="one request, time against context"
    )
    axes.set_xticks(tokens, [f"{t // 1024}k" if t < 2**20 else f"{t >> 20}M" for t in tokens])
    _plain_numbers(axes)


def _plain_numbers(axes: Any) -> None:
    """1, 2, 5, 10 instead of powers up the side; no minor ticks; a small legend."""
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
