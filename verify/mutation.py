"""Shows every mutant to every probe: which tier kills it on which kind of input, and whether `allclose` would have.

A harness that lets a planted fault pass is broken, and so is one that kills the healthy kernels; the results say both.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from cupy_kernels import jit

from . import run
from .cases import NON_FINITE
from .mutants import MUTANTS, Mutant
from .peers import peers
from .probes import PROBES, Probe, cuts, execute, prepare

HEALTHY = Mutant(0, "healthy", "the kernels as they are", (), healthy=True)
# What a tier looks at. Tiers of one view are one witness: a value beyond T1's bound is beyond T2's as well.
VIEWS = {"T0": "values", "T1": "values", "T2": "values", "T3": "statistics", "T3b": "statistics", "T4": "statistics",
         "T5": "lse", "T6": "partial states", "T7": "non-finite"}  # fmt: skip
# Enough to kill every mutant twice, and to ask `allclose` on standard normal inputs; and the mutants of a quick run besides the
# classic mistakes.
QUICK_KINDS = ("randn_short", "randn_ragged", "randn_mqa", "randn_window", "window_short", "one_long", "many_splits", "neg_1e5",
               "far_pages", "inf_q", "in_place", "in_place_flip")  # fmt: skip
QUICK_MUTANTS = ("max_starts_at_zero", "newest_token_lost", "nan_laundered", "stale_partials", "int32_offset", "token_cut")


def check_applies(mutant: Mutant) -> None:
    """ValueError unless every patch of a mutant finds its text and changes a kernel, and there is one if it is a fault."""
    if not mutant.patches and not mutant.healthy:
        raise ValueError(f"mutant {mutant.name}: expected a patch, got none")
    if not mutant.patches:
        return
    for file, old, new in mutant.patches:
        if not (jit.KERNELS / file).exists() or old == new:
            raise ValueError(f"mutant {mutant.name}: expected a change to a file of kernel text, got {file}: {old!r} -> {new!r}")
    change = lambda name, cpu: jit.read_source(name, cpu, mutant.patches) != jit.read_source(name, cpu)
    changed = {name: (change(name, False), change(name, True)) for name in ("partial.cu", "merge.cu")}
    # A file that neither kernel includes, or that the CPU replaces, would be patched without effect.
    if not any(gpu for gpu, _ in changed.values()) or any(gpu != cpu for gpu, cpu in changed.values()):
        raise ValueError(f"mutant {mutant.name}: expected its patches to change {' or '.join(changed)}, got the same text")


def examine(mutant: Mutant, probes: Sequence[Probe], device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """One mutant before all probes: its row, as `matrix` describes it."""
    check_applies(mutant)
    xp: Any = np
    if device == "gpu":
        import cupy as xp  # type: ignore[no-redef]
    killed_by, passes = [], {}
    with jit.settings(patches=mutant.patches, readable=True):
        for probe in probes:
            prepared = prepare(probe, seed)
            results = execute(prepared, xp)
            report = prepared.judge(results, mutant.cut)
            killed_by += [[tier, probe.kind] for tier, verdict in report.verdicts.items() if verdict.verdict == "fail"]
            if probe.case.family not in NON_FINITE:
                passes[probe] = peers(results["out"], prepared.want[0])
    kinds, views = {kind for _, kind in killed_by}, {VIEWS[tier] for tier, _ in killed_by}
    twice = len(kinds) >= 2 or len(views) >= 2
    verdict = ("false alarm" if killed_by else "clean") if mutant.healthy else "killed" if twice else "survived"
    checkers = {
        name: {where: _killed(tolerated[name] for probe, tolerated in passes.items() if probe.classic or where == "everything")
               for where in ("randn", "everything")}
        for name in next(iter(passes.values()), {})
    }  # fmt: skip
    return {
        "name": mutant.name, "row": mutant.row, "fault": mutant.fault, "classic": mutant.classic, "healthy": mutant.healthy,
        "verdict": verdict, "killed_by": killed_by, "tiers": sorted({tier for tier, _ in killed_by}), "families": sorted(kinds),
        "allclose_1e2_on_randn": checkers.get("allclose 1e-2", {}).get("randn"), "peers": checkers,
        **({"pages": pages_read(probes, seed)} if mutant.cut == "tokens" else {}),
    }  # fmt: skip


def _killed(tolerated: Iterable[bool]) -> str | None:
    """None if nothing was looked at."""
    verdicts = list(tolerated)
    return ("missed" if all(verdicts) else "killed") if verdicts else None


def pages_read(probes: Sequence[Probe], seed: int = 0) -> dict[str, int]:
    """Pages that the splits of all probes touch, by where they are cut: what a cut along tokens reads twice."""
    counted = dict.fromkeys(("pages", "tokens"), 0)
    for probe in probes:
        inputs = prepare(probe, seed).inputs
        for cut in counted:
            splits = [tokens for request in cuts(inputs, probe.case, cut) for tokens in request if tokens]
            counted[cut] += sum(-(-s.stop // inputs.page_size) - s.start // inputs.page_size for s in splits)
    return counted


def selection(depth: str) -> tuple[tuple[Mutant, ...], tuple[Probe, ...]]:
    """The mutants and probes of a depth, "quick" or "full", the healthy kernels first."""
    if depth not in ("quick", "full"):
        raise ValueError(f"depth: expected 'quick' or 'full', got {depth!r}")
    if depth == "full":
        return (HEALTHY, *MUTANTS), PROBES
    chosen = tuple(mutant for mutant in MUTANTS if mutant.classic or mutant.name in QUICK_MUTANTS)
    return (HEALTHY, *chosen), tuple(probe for probe in PROBES if probe.kind in QUICK_KINDS)


def matrix(
    depth: str = "full", device: str = "cpu", *, seed: int = 0, mutants: Sequence[Mutant] | None = None,
    probes: Sequence[Probe] | None = None, workers: int | None = None, progress: Callable[[str], object] = lambda name: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The kill matrix, a dictionary per mutant, the healthy kernels first.

    Args:
        depth: "quick" (the classics and a sample, on the fewest kinds of input) or "full" (everything).
        device: "cpu" or "gpu".
        seed: added to that of every case.
        mutants, probes: instead of those of the depth.
        workers: processes; None is one per core. On a GPU, as many as its memory has room for, and no more than 4.
        progress: called with the name of each mutant that is through.

    Returns:
        Per mutant `name`, `row`, `fault`, `classic` ("" or the mistake), `healthy`; `killed_by` [[tier, kind of input], ...],
        `tiers` and `families` of these; `verdict`: "killed" if two kinds of input or two independent tiers do, else "survived",
        and "clean" or "false alarm" where there is no fault; `allclose_1e2_on_randn`: "killed" or "missed"; `peers`: the same of
        other projects' tolerances, on standard normal inputs and on everything; `pages` (of a cut along tokens): pages read.

    Raises:
        ValueError: no mutants or no probes, kinds or names that are not unique, a patch that does not change the kernels.
        RuntimeError: kernel text that does not compile, or deadlocks. A mutant is killed by a verdict, not by an accident.
    """
    chosen = selection(depth)
    mutants = chosen[0] if mutants is None else mutants
    probes = chosen[1] if probes is None else probes
    for name, values in (("mutants", [m.name for m in mutants]), ("probes", [p.kind for p in probes])):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name}: expected at least one, each with a name of its own, got {values}")
    for mutant in mutants:
        check_applies(mutant)
    workers = _processes(device, workers or run.workers())
    rows = []
    if workers == 1:
        for mutant in mutants:
            rows.append(examine(mutant, probes, device, seed))
            progress(mutant.name)
        return rows
    # A forked child would inherit the locks of this process's threads.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(examine, mutant, probes, device, seed) for mutant in mutants]
        for mutant, future in zip(mutants, waiting, strict=True):
            rows.append(future.result())
            progress(mutant.name)
    return rows


def _processes(device: str, workers: int) -> int:
    """No more than the memory of a GPU has room for: a pool of far pages takes 8.6 GB in every process."""
    if device == "cpu":
        return workers
    import cupy

    return max(1, min(workers, 4, cupy.cuda.Device().mem_info[0] // 10**10))


def passed(rows: Sequence[dict[str, Any]]) -> bool:
    """Every fault is killed and nothing healthy is."""
    return bool(rows) and all(row["verdict"] in ("killed", "clean") for row in rows)
