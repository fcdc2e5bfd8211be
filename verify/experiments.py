"""The report's experiments: what 16-bit intermediates cost, and where NaN gets to from empty splits."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from . import empties, precision, run
from .cases import Case
from .precision import INSIDE, PARTIALS, SMALL, STORAGES, TOLERANCE, Cell, Storage
from .report import Section

FAMILIES = {
    "quick": ("normal", "offset_plus", "pos_v", "ramp_up", "split_flip", "cancel"),
    "full": ("normal", "offset_plus", "pos_v", "ramp_up", "split_flip", "cancel", "large", "sink_first", "split_flip_off"),
}
SPLITS = {"quick": (1, 8, 32, 128), "full": (1, 2, 4, 8, 16, 32, 64, 128)}
# More of the context where it is long: (context, splits).
LONG = {"quick": (), "full": ((4096, 8), (4096, 64))}


def sections(
    depth: str = "quick", device: str = "cpu", *, seed: int = 0, workers: int | None = None,
    progress: Callable[[str], object] = lambda name: None,
) -> list[Section]:  # fmt: skip
    """All experiments, `depth` "quick" or "full", `device` "cpu" or "gpu"; ValueError for another depth."""
    cells = measured(depth, device, seed=seed, workers=workers, progress=progress)
    maps = empties.maps(device, seed, progress)
    return [partial_section(cells), inside_section(cells), cancellation_section(cells), empties_section(maps)]


def measured(
    depth: str, device: str, *, seed: int = 0, workers: int | None = None, progress: Callable[[str], object] = lambda name: None
) -> list[Cell]:
    """Every family, context, number of splits and storage of the precision experiment."""
    if depth not in SPLITS:
        raise ValueError(f"depth: expected 'quick' or 'full', got {depth!r}")
    shapes = [*((1024, num_splits) for num_splits in SPLITS[depth]), *LONG[depth]]
    cases = [precision.case(family, *shape, seed) for family in FAMILIES[depth] for shape in shapes]
    found: list[Cell] = []
    for each, cells in zip(cases, _spread(cases, device, workers), strict=True):
        found += cells
        progress(each.name)
    return found


def _spread(cases: Sequence[Case], device: str, workers: int | None) -> Iterable[list[Cell]]:
    workers = workers or run.workers()
    if workers == 1:
        yield from (precision.cells(each, device) for each in cases)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        # Every storage has kernels of its own: each is compiled once, before all processes want it.
        small = precision.case("normal", 16, 1)
        for compiled in [pool.submit(precision.measure, small, storage, device) for storage in STORAGES]:
            compiled.result()
        yield from pool.map(precision.cells, cases, [device] * len(cases))


def partial_section(cells: Sequence[Cell]) -> Section:
    """Stored o and lse: measured against both predictions, and the claim."""
    chosen = [cell for cell in cells if cell.storage in PARTIALS]
    claimed, drawn = [c for c in chosen if c.claimed], [c for c in chosen if c.drawn]
    tossed = sum(not c.decided and c.lse_error <= SMALL for c in chosen)
    worst = max((c.off for c in chosen), default=0.0)
    ordinary = [c.measured for c in chosen if c.family == "normal" and str(c.storage) == "o fp16" and c.num_splits > 1] or [
        np.nan
    ]
    summary = (
        "An fp16 partial o costs as much again as the output's own fp16 rounding, whatever the number of splits "
        f"(rho {np.median(ordinary):.2f} on standard normal inputs: the square root of 2), and far more where splits cancel each "
        "other. A 16-bit lse is never worth the two bytes it saves: it is rounded on its own scale, but is an exponent."
    )
    notes = [
        "rho is RMS(error) / RMS(error of an ideally rounded float16 output): 1 is as good as float32 partial states.",
        f"Wherever half an ulp of the lse is at most {SMALL} ({len(claimed)} of {len(chosen)} configurations; {tossed} more "
        f"hang on an lse next to a tie), measured has to agree within {TOLERANCE:.0%} with the roundings of the exact states. It "
        "has to agree with the formula too, which takes roundings as independent draws, where the known ones are as large as "
        f"draws within {TOLERANCE / 2:.0%} ({len(drawn)} configurations). Worst deviation: {worst:.1%}. The others stand beside "
        "it, without a claim (hollow).",
    ]
    return Section(
        "fp32, fp16 and bf16 partial states", summary, COLUMNS, rows(chosen, PARTIALS),
        picture("rho_panels", chosen, PARTIALS, "partials"), bool(claimed and drawn) and worst <= TOLERANCE, notes,
    )  # fmt: skip


def inside_section(cells: Sequence[Cell]) -> Section:
    """P and acc in 16 bits, and everything at once: predicted, without a claim."""
    chosen = [cell for cell in cells if cell.storage in INSIDE]
    baseline = max(cell.measured for cell in cells if not cell.storage.parts)
    near = np.mean([abs(cell.measured / cell.formula - 1) <= TOLERANCE for cell in chosen])
    summary = (
        "Inside a split: P costs less than one rounding of the output in fp16 and several in bf16, an accumulator the more, "
        "the more tiles a split has; what all four cost together adds up in squares. "
        f"With all of them in float32, rho is at most {baseline:.2f}."
    )
    notes = [
        f"Predicted by the formula alone, without a claim; {near:.0%} of the configurations are within {TOLERANCE:.0%} of it."
    ]
    return Section(
        "16 bits for P, for the accumulator, for everything", summary, COLUMNS, rows(chosen, INSIDE),
        picture("rho_panels", chosen, INSIDE, "inside"), notes=notes,
    )  # fmt: skip


COLUMNS = ("family", "in 16 bits", "measured rho", "formula", "known roundings", "claimed", "worst")


def rows(cells: Sequence[Cell], storages: Sequence[Storage]) -> list[list[str]]:
    """A row per family and storage: median and largest over contexts and splits above 1, the claims and their worst deviation."""
    groups = defaultdict(list)
    for cell in cells:
        groups[cell.family, cell.storage].append(cell)
    table = []
    for family in dict.fromkeys(cell.family for cell in cells):
        for storage in storages:
            group = groups[family, storage]
            several = [cell for cell in group if cell.num_splits > 1] or group
            claimed = [cell for cell in group if cell.claimed]
            known = [cell.known for cell in several if cell.known is not None]
            table.append([
                family, str(storage), spread([c.measured for c in several]), spread([c.formula for c in several]), spread(known),
                f"{len(claimed)} of {len(group)}" if known else "", f"{max(c.off for c in claimed):.1%}" if claimed else "",
            ])  # fmt: skip
    return table


def spread(values: Sequence[float]) -> str:
    """Median and largest."""
    digits = lambda x: f"{x:.2f}" if x < 10 else f"{x:.0f}"
    return f"{digits(float(np.median(values)))} (to {digits(max(values))})" if values else ""


def cancellation_section(cells: Sequence[Cell]) -> Section:
    """When a 16-bit partial o matters: rho against how much the splits cancel."""
    of = {
        dtype: [c for c in cells if c.storage == Storage(("o",), dtype) and c.num_splits > 1] for dtype in ("float16", "bfloat16")
    }
    families = dict.fromkeys(cell.family for cell in cells)
    own = lambda family, dtype, what: spread([getattr(c, what) for c in of[dtype] if c.family == family])
    table = [
        [family, own(family, "float16", "cancellation"), own(family, "float16", "measured"), own(family, "bfloat16", "measured")]
        for family in families
    ]
    summary = (
        "What decides is how large the partial o are against the output they leave, each by its weight and added in squares, for "
        "each is rounded once. Splits alike give 1, so that rho = sqrt(2); V of one sign gives 1 / sqrt(splits): nearly free; "
        "splits of opposite signs cancel and leave less than their parts. Nothing promises that splits do not cancel."
    )
    columns = ("family", "size of partial o", "rho, o fp16", "rho, o bf16")
    return Section(
        "When 16-bit partial states matter", summary, columns, table, picture("cancellation", of["float16"], of["bfloat16"])
    )


def empties_section(maps: empties.Maps) -> Section:
    """The map of NaN from empty splits, with its counts; it fails if the guarded kernels show any."""
    table = [
        [pattern.name, ", ".join(map(str, pattern.lens)), schedule,
         *(f"{maps[guards][pattern.name][schedule].sum()} of 16" for guards in empties.GUARDS)]
        for pattern in empties.PATTERNS for schedule in empties.SCHEDULES
    ]  # fmt: skip
    summary = (
        "Without guards, every request that leaves a split empty is NaN. A guarded merge alone hides empty splits, but neither "
        "the unsplit kernel's nor those of a head whose scores are -inf. A guarded partial kernel alone fails where all splits "
        "are empty. With both, nothing is NaN."
    )
    notes = [
        "Blocks are 4 requests by 4 query heads. In the last lengths, KV head 1 sees nothing of request 0, less than all of 1 "
        "and 3. The page table is two pages wider than the longest request, as it would be in a captured graph: with a page to "
        "each split, some are always empty. Schedules of two launches."
    ]
    clean = not any(found.any() for by_schedule in maps[True, True].values() for found in by_schedule.values())
    columns = ("lengths", "tokens", "schedule", *map(empties.words, empties.GUARDS))
    return Section("NaN from empty splits", summary, columns, table, picture("empties_map", maps), clean, notes)


def picture(name: str, *contents: Any) -> str:
    """A picture of `verify.plots`; none without Matplotlib, as the numbers stand in the tables too."""
    try:
        from . import plots
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("matplotlib"):
            raise
        return ""
    return getattr(plots, name)(*contents)
