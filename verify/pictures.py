"""Pictures for the report: SVG that takes its ink from the page, so that it reads in light and dark alike."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Stands for the page's text colour until `to_svg` makes it `currentColor`.
INK = "#010203"
# By stage: scores blue, exponentials teal, sums green, P red, partial states orange and brown, merge violet, output grey.
COLOURS = {
    "qk_dot": "#4c78a8",
    "scale_const": "#7fa3cc",
    "score_mul": "#2f6db5",
    "score_sub": "#9fbfe0",
    "ex2": "#1f9e89",
    "rescale_w": "#56b8a6",
    "rescale_mul": "#8fd0c4",
    "underflow": "#b8a88a",
    "flush": "#8d7f64",
    "p_round": "#d1495b",
    "pv_acc": "#5aa24a",
    "l_acc": "#8fc482",
    "state_merge": "#b9d98f",
    "norm": "#3f7d3a",
    "lse_calc": "#c99a3b",
    "lse_store": "#a06a2c",
    "o_store": "#e07b39",
    "merge_w": "#9a6fb8",
    "merge_acc": "#c3a1d9",
    "out_round": "#9aa0a6",
}
# The kernel's own part of a bound, beside the final rounding.
OWN = "#c8553d"
# For the whole process: titles and legends take their style when they are made.
matplotlib.rcParams.update({
    "svg.fonttype": "none",
    # The same ids in every run.
    "svg.hashsalt": "verify",
    "font.size": 11,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "figure.constrained_layout.use": True,
})  # fmt: skip


def figure(width: float = 9.0, height: float = 4.0, **subplots: Any) -> tuple[Figure, Any]:
    """A figure in the report's style, inches, and its axes as `Figure.subplots(**subplots)` gives them."""
    made = Figure((width, height))
    return made, made.subplots(**subplots)


def to_svg(made: Figure, name: str) -> str:
    """One <svg> element to put into a page. `name` keeps the ids of several pictures on a page apart.

    Text stays text, in the page's font; what has the colour `INK` takes the page's.
    """
    buffer = io.StringIO()
    none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    made.savefig(buffer, format="svg", transparent=True, metadata=none)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r"(font: [\d.]+px)[^;\"]*", r"\1 system-ui, sans-serif", svg)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    width = float(svg[svg.index('width="') + 7 :].partition("pt")[0])
    size = f'width="{width * 4 / 3:.0f}" role="img" aria-label="{name}"'
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', size, svg, count=1)
    return svg.replace(INK, "currentColor").replace("xlink:href", "href")


def budget_bars(rows: Sequence[dict[str, Any]]) -> str:
    """Two bars per row, of its worst element: the bound, marked where the error came to, and the kernel's own part by source.

    "" without rows.
    """
    if not rows:
        return ""
    made, (whole, own) = figure(9.5, 0.25 * len(rows) + 1.7, ncols=2, sharey=True, width_ratios=(2, 3))
    shown = set()
    for y, row in enumerate(rows):
        budget = row["worst"]["budget"]
        total, rounding = sum(budget.values()), budget.get("out_round", 0.0)
        whole.barh(y, 1 - rounding / total, height=0.7, color=OWN, linewidth=0)
        whole.barh(y, rounding / total, left=1 - rounding / total, height=0.7, color=COLOURS["out_round"], linewidth=0)
        error = abs(row["worst"]["got"] - row["worst"]["want"]) / total
        whole.plot([error, error], [y - 0.46, y + 0.46], color=INK, linewidth=2.2, solid_capstyle="butt")
        left = 0.0
        for source in COLOURS:
            share = budget.get(source, 0.0) / (total - rounding) if source != "out_round" and total > rounding else 0.0
            own.barh(y, share, left=left, height=0.7, color=COLOURS[source], linewidth=0)
            left += share
            # Slivers are drawn but get no entry in the legend.
            shown |= {source} if share > 0.03 else set()
    whole.set_yticks(range(len(rows)), [row["family"] for row in rows])
    whole.set_ylim(len(rows) - 0.4, -0.6)
    for axes, title in ((whole, "The bound, and the error (mark)"), (own, "The kernel's own part, by source")):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "50 %", "", "100 %"])
        axes.grid(axis="y", visible=False)
        axes.tick_params(length=0)
        axes.spines["left"].set_visible(False)
    handles = [Patch(color=OWN, label="kernel"), Patch(color=COLOURS["out_round"], label="final rounding")]
    handles += [Patch(color=COLOURS[source], label=source) for source in COLOURS if source in shown]
    made.legend(handles=handles, loc="outside upper left", ncols=7, fontsize=10, handleheight=1.1, columnspacing=1.4)
    return to_svg(made, "budget")
