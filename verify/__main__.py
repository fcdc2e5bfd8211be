"""`python -m verify`: the error report. Exits with 0 if everything holds, 1 if anything fails, 2 for a bad argument."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupy_kernels import jit

from . import hardware, ratchet, report, run, terminal, trace
from .environment import DEVICES, choose_device, environment, keep, no_gpu_reason
from .lists import LISTS, default_lists

# Parts of the report beside the cases -> (module, function of `depth, device, *, workers, progress`). They return dictionaries as
# `report.mutant_as_expected` reads them, and `report.Section`s.
PARTS = {"mutants": ("mutation", "matrix"), "experiments": ("experiments", "sections")}


def parser() -> argparse.ArgumentParser:
    """Of the whole command line; reproduce commands in reports go through it too."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", choices=DEVICES, default="auto", help="auto: the GPU if there is one, else the CPU stand-in")
    common.add_argument("--out", type=Path, default=Path("verify-report"), metavar="DIR", help="where reports go")
    chosen = argparse.ArgumentParser(add_help=False)
    names = ",".join(LISTS)
    chosen.add_argument(
        "--cases",
        type=_names,
        metavar=names,
        help="lists of cases alone; without it, those that the device and depth have time for, and every other part",
    )
    chosen.add_argument("--depth", choices=tuple(run.SEEDS), default="quick", help="full: every case with several seeds")
    chosen.add_argument("--workers", type=int, metavar="N", help="processes that share the work; the cores, by default")

    whole = argparse.ArgumentParser(
        prog="python -m verify", description="How wrong the kernels are, and why.", parents=[common, chosen]
    )
    whole.add_argument("--case", action="append", default=[], metavar="NAME", help="one case alone; may be repeated")
    whole.add_argument("--seed", type=int, metavar="N", help="of the inputs, instead of each case's own")
    whole.add_argument("--keep", action="store_true", help="the report also into verify/results/, named by device and date")
    whole.add_argument("--skip", action="append", default=[], choices=tuple(PARTS), help="leave out a part; may be repeated")
    commands = whole.add_subparsers(dest="command", metavar="{trace,hardware,ratchet}")
    add = lambda name, text, *parents: commands.add_parser(name, help=text, description=text, parents=[common, *parents])
    trace.add_arguments(add("trace", "One head worked through as on paper."))
    hardware.add_arguments(add("hardware", "Measure the device's functions, casts and tensor cores."))
    recorded = add("ratchet", "What errors were recorded; with --renew, measure and record them anew.", chosen)
    recorded.add_argument(
        "--renew", action="store_true", help="on purpose: what is measured now becomes what later runs are held to"
    )
    return whole


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    given = parser().parse_args(arguments)
    try:
        device = choose_device(given.device)
        return {"trace": _trace, "hardware": _hardware, "ratchet": _ratchet, None: _verify}[given.command](given, device)
    except ValueError as error:
        print(f"python -m verify: {error}", file=sys.stderr)
        return 2


def _trace(given: argparse.Namespace, device: str) -> int:
    trace.run(given, device)
    return 0


def _hardware(given: argparse.Namespace, device: str) -> int:
    wrong = hardware.run(given, device)
    print(
        f"FAIL: {'; '.join(wrong)}"
        if wrong
        else f"PASS: as documented, and as the CPU stand-in has it; {given.out / 'hardware.json'}"
    )
    return 1 if wrong else 0


def _ratchet(given: argparse.Namespace, device: str) -> int:
    name = environment(device)["device"]
    if not given.renew:
        for configuration, measures in ratchet.load(ratchet.RATCHET).get(run.ratchet_device(name), {}).items():
            print(f"{configuration}  {', '.join(f'{key} {value:.4g}' for key, value in measures.items())}")
        return 0
    rows, pools = _cases(given, device, name, [], None)
    failed = [row["name"] for row in [*rows, *pools] if row["verdict"] != "pass"]
    # A record of a broken kernel would let it pass from now on.
    if failed:
        print(f"FAIL: nothing recorded, for {len(failed)} checks fail: {', '.join(failed[:5])}")
        return 1
    run.renew_ratchet(pools, name, _configuration(given, device))
    print(f"recorded {len(pools)} configurations of {run.ratchet_device(name)} in {ratchet.RATCHET.name}")
    return 0


def _verify(given: argparse.Namespace, device: str) -> int:
    started = time.perf_counter()
    found = environment(device)
    rows, pools = _cases(given, device, found["device"], given.case, given.seed)
    whole = not given.case and given.cases is None
    # Only like compares with like: the same cases with the same seeds.
    if not given.case and given.seed is None:
        run.check_ratchet(pools, found["device"], _configuration(given, device))
    parts = {part: _part(part, given, device) if whole and part not in given.skip else None for part in PARTS}
    mutants, sections = parts["mutants"] or [], parts["experiments"] or []
    made = report.assemble(
        found, rows, pools, mutants, sections,
        depth=given.depth, seconds=round(time.perf_counter() - started, 1), no_gpu=device == "cpu" and bool(no_gpu_reason()),
        skipped=[part for part, result in parts.items() if result is None],
    )  # fmt: skip
    paths = report.save(made, sections, given.out)
    if given.keep:
        paths += keep(paths, found)
    terminal.write(terminal.console(), made)
    print(f"\n{' and '.join(map(str, paths))}, {made['seconds']} s")
    if not any(path.suffix == ".html" for path in paths):
        print("report.html was not written: it needs jinja2 and matplotlib")
    print(report.last_line(made))
    return 0 if made["verdict"] == "pass" else 1


def _cases(
    given: argparse.Namespace, device: str, device_name: str, names: Sequence[str], seed: int | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of cases and of pools."""
    chosen = run.choose(given.cases or default_lists(device, given.depth), names, seed, given.depth)
    # What the caller planted here is planted in every process.
    patches = jit._settings["patches"]
    repeats = run.REPEATS[given.depth] if device == "cpu" else run.GPU_REPEATS
    tasks = [run.Task(case, name, device, device_name, repeats, patches) for name, case in chosen]
    with terminal.progress("cases", len(tasks)) as done:
        judged = run.run(tasks, given.workers or run.workers(), done)
    samples = [(task.case, sample) for task, (_, sample) in zip(tasks, judged, strict=True) if sample is not None]
    return [row for row, _ in judged], run.pools(samples)


def _configuration(given: argparse.Namespace, device: str) -> str:
    return f"{given.depth} {','.join(given.cases or default_lists(device, given.depth))}"


def _part(part: str, given: argparse.Namespace, device: str) -> list[Any] | None:
    """The mutants' matrix or the experiments' sections; None where their module is not there yet. An accident is a failed row."""
    name, function = PARTS[part]
    if importlib.util.find_spec(f"{__package__}.{name}") is None:
        return None
    try:
        make = getattr(importlib.import_module(f".{name}", __package__), function)
        with terminal.progress(part, None) as done:
            return list(make(given.depth, device, workers=given.workers, progress=lambda *_: done()))
    except Exception:
        text = traceback.format_exc()
        if part == "experiments":
            return [report.Section(part, text, passed=False)]
        return [{"name": part, "fault": text, "killed_by": [], "verdict": "not run", "allclose_1e2_on_randn": None}]


if __name__ == "__main__":
    sys.exit(main())
