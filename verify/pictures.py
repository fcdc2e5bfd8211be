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
STYLE = {
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
}


def figure(width: float = 9.0, height: float = 4.0, **subplots: Any) -> tuple[Figure, Any]:
    """A figure in the report's style, inches, and its axes as `Figure.subplots(**subplots)` gives them."""
    with matplotlib.rc_context(STYLE):
        made = Figure((width, height), layout="constrained")
        return made, made.subplots(**subplots)


def to_svg(made: Figure, name: str) -> str:
    """One <svg> element to put into a page. `name` keeps the ids of several pictures on a page apart.

    Text stays text, in the page's font; what has the colour `INK` takes the page's.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        made.savefig(buffer, format="svg", transparent=True, metadata=none)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r"(font: [\d.]+px)[^;\"]*", r"\1 system-ui, sans-serif", svg)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    width = float(svg[svg.index('width="') + 7 :].partition("pt")[0])
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'width="{width:.0f}" role="img" aria-label="{name}"', svg, count=1)
    svg = re.sub(r' height="[\d.]+pt"', "", svg, count=1)
    return svg.replace(INK, "currentColor").replace("xlink:href", "href")


def budget_bars(rows: Sequence[dict[str, Any]]) -> str:
    """A bar per row, the bound of its worst element by source, and a mark where the error came to. "" without rows."""
    if not rows:
        return ""
    height = 0.24 * len(rows) + 1.5
    made, axes = figure(9, height)
    labels = [row["family"] for row in rows]
    used = set()
    for y, row in enumerate(rows):
        budget, left = row["worst"]["budget"], 0.0
        total = sum(budget.values())
        for source in COLOURS:
            if (share := budget.get(source, 0.0) / total) > 0:
                # Slivers are drawn but get no entry in the legend.
                used |= {source} if share > 0.02 else set()
                axes.barh(y, share, left=left, height=0.72, color=COLOURS[source], linewidth=0)
                left += share
        error = abs(row["worst"]["got"] - row["worst"]["want"]) / total
        axes.plot([error, error], [y - 0.46, y + 0.46], color=INK, linewidth=2.2, solid_capstyle="butt")
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the bound; the mark is the error")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    handles = [Patch(color=COLOURS[source], label=source) for source in COLOURS if source in used]
    made.legend(
        handles=handles, loc="outside upper left", ncols=6, fontsize=10, handlelength=1, handleheight=1, columnspacing=1.4
    )
    return to_svg(made, "budget")
