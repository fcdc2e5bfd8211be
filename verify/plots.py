"""The pictures of the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from . import empties
from .pictures import INK, figure, to_svg
from .precision import Cell, Storage

# Hue by what is stored, shade by how: full colour for fp16, pale for bf16.
HUES = {"o": "#e07b39", "lse": "#9a6fb8", "p": "#d1495b", "acc": "#5aa24a", "all four": "#4c78a8"}
FAMILY_COLOURS = ("#4c78a8", "#1f9e89", "#d1495b", "#5aa24a", "#c99a3b", "#e07b39", "#9a6fb8", "#a06a2c", "#9aa0a6")


def rho_panels(cells: Sequence[Cell], storages: Sequence[Storage], name: str) -> str:
    """rho against the number of splits, a panel per family: marks are measured, lines the formula. "" without cells."""
    families = list(dict.fromkeys(cell.family for cell in cells))
    if not families:
        return ""
    nrows = -(-len(families) // 3)
    made, grid = figure(9, 1.2 + 2.2 * nrows, nrows=nrows, ncols=3, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(families) :]:
        axes.set_visible(False)
    for axes, family in zip(grid.flat, families, strict=False):
        axes.axhline(1, color=INK, linewidth=1, alpha=0.5)
        for storage in storages:
            line = sorted(
                (c for c in cells if (c.family, c.storage, c.context) == (family, storage, 1024)), key=lambda c: c.num_splits
            )
            x, colour = [c.num_splits for c in line], _colour(storage)
            axes.plot(x, [c.formula for c in line], color=colour, linewidth=1.3)
            filled = [c for c in line if c.claimed or c.known is None]
            axes.scatter([c.num_splits for c in filled], [c.measured for c in filled], s=26, color=colour, zorder=3)
            hollow = [c for c in line if c not in filled]
            axes.scatter(
                [c.num_splits for c in hollow], [c.measured for c in hollow], s=26, facecolor="none", edgecolor=colour, zorder=3
            )
        axes.set_title(family, fontsize=11)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.minorticks_off()
        ticks = [x for x in (1, 8, 32, 128) if x in {c.num_splits for c in cells}]
        axes.set_xticks(ticks, [str(x) for x in ticks])
    grid[-1, 0].set_xlabel("splits")
    grid[0, 0].set_ylabel("rho")
    handles = [Line2D([], [], color=_colour(s), marker="o", markersize=5, linewidth=1.3, label=str(s)) for s in storages]
    made.legend(handles=handles, loc="outside upper left", ncols=6, fontsize=10, columnspacing=1.4)
    return to_svg(made, name)


def _colour(storage: Storage) -> Any:
    hue = HUES[storage.parts[0] if len(storage.parts) == 1 else "all four"]
    return hue if storage.dtype == "float16" else to_rgba(hue, 0.5)


def cancellation(fp16: Sequence[Cell], bf16: Sequence[Cell]) -> str:
    """rho of a 16-bit partial o against the size of what is rounded, a colour per family; lines are sqrt(1 + size^2) in ulps."""
    made, axes = figure(9, 4)
    for family, colour in zip(dict.fromkeys(cell.family for cell in fp16), FAMILY_COLOURS, strict=False):
        for marker, cells in (("o", fp16), ("s", bf16)):
            chosen = [c for c in cells if c.family == family]
            label = family if marker == "o" else None
            axes.scatter(
                [c.cancellation for c in chosen], [c.measured for c in chosen], s=30, marker=marker, color=colour, label=label
            )
    sizes = [c.cancellation for c in (*fp16, *bf16)]
    x = np.geomspace(min(sizes), max(sizes), 100)
    # An ulp of bf16 is 8 of fp16.
    for ulps in (1, 8):
        axes.plot(x, np.sqrt(1 + (ulps * x) ** 2), color=INK, linewidth=1, alpha=0.5, zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("size of the partial o (weighted, added in squares) against the output")
    axes.set_ylabel("rho (circles fp16, squares bf16)")
    made.legend(loc="outside right upper", fontsize=10)
    return to_svg(made, "cancellation")


def empties_map(maps: empties.Maps) -> str:
    """A block of 4 requests x 4 query heads per guards (rows), lengths and schedule (columns); filled is NaN."""
    made, axes = figure(9, 3.4)
    columns = [(pattern.name, schedule) for pattern in empties.PATTERNS for schedule in empties.SCHEDULES]
    left = [5 * i + 2 * (i // len(empties.SCHEDULES)) for i in range(len(columns))]
    for y, guards in enumerate(empties.GUARDS):
        for x, (pattern, schedule) in zip(left, columns, strict=True):
            for (b, h), nan in np.ndenumerate(maps[guards][pattern][schedule]):
                colour = "#d1495b" if nan else INK
                axes.add_patch(Rectangle((x + h, 5.5 * y + b), 0.86, 0.86, color=colour, alpha=1 if nan else 0.15, linewidth=0))
    axes.set_xlim(-0.5, left[-1] + 4.5)
    axes.set_ylim(5.5 * len(empties.GUARDS) - 1, -0.5)
    axes.set_aspect("equal")
    axes.grid(False)
    axes.set_yticks([5.5 * y + 2 for y in range(len(empties.GUARDS))], [empties.words(g) for g in empties.GUARDS])
    axes.set_xticks([x + 2 for x in left], [schedule for _, schedule in columns], rotation=60, ha="right", fontsize=9)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for i, shown in enumerate(empties.PATTERNS):
        axes.text(left[3 * i + 1] + 2, -1.2, shown.name, ha="center", fontsize=10)
    return to_svg(made, "empties")
