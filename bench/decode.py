"""`bench decode`: each case checked, then timed, beside the read floor and the peers; over splits; over the context."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from cupy_kernels import DecodePlan, plan_splits
from cupy_kernels.decode import partial_blocks

from . import accuracy, floor, loading, timing
from .cases import BenchCase, PageSets, build

SWEEP_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
SAME_BITS_CALLS = 20


@dataclass
class Options:
    """What the command line asks for, beyond the cases."""

    # keyword arguments of paged_decode that choose the schedule; empty is the automatic choice
    schedule: dict[str, Any] = field(default_factory=dict)
    repeats: int = timing.REPEATS
    accuracy: bool = False
    sweep: bool = False
    # names of peers.PEERS, and the folder of their loose files
    peers: Sequence[str] = ()
    peers_dir: Path | None = None
    seed: int = 0
    # where arrays live: cupy; numpy in tests
    xp: ModuleType | None = None
    # bytes that the page sets of a case hold together
    cold_bytes: int = 256 << 20
    say: Callable[[str], None] = print


def prepare(sets: PageSets, schedule: dict[str, Any]) -> accuracy.Call:
    """The path of an engine, `DecodePlan.run`, on page set i."""
    # Views made once: a view costs the host as much as a launch.
    arguments = [sets.arguments(i) for i in range(len(sets))]
    out, lse = (list(array) for array in (sets.out, sets.lse))
    plan = DecodePlan(*arguments[0], layout=sets.case.layout, **schedule)

    def run(i: int) -> Any:
        plan.run(*arguments[i], out=out[i], lse_out=lse[i])
        return out[i]

    return run


class Bench:
    """One run over cases; `rows` grows as it goes."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []
        self.phases: dict[str, float] = {}
        self._references: dict[str, accuracy.Reference] = {}

    def phase(self, name: str, since: float) -> None:
        """Adds the time since to a phase."""
        self.phases[name] = round(self.phases.get(name, 0.0) + time.perf_counter() - since, 2)

    def build(self, case: BenchCase) -> PageSets:
        """The arrays of a case; those of the case before are given back."""
        xp = self.options.xp or importlib.import_module("cupy")
        if xp.__name__ == "cupy":
            xp.get_default_memory_pool().free_all_blocks()
        return build(case, xp, self.options.seed, self.options.cold_bytes)

    def decode(self, cases: Sequence[BenchCase], done: Callable[[dict[str, Any]], None] = lambda row: None) -> None:
        """All checks, then all times. `done` is called with the row of each case that has been timed."""
        options = self.options
        compiling = loading.start_compiling(cases) if any("FlashInfer" in name for name in options.peers) else None
        try:
            good = [case for case in cases if self._check(case)]
            peers = list(options.peers)
            # Nothing is timed while compilers keep the host busy.
            if compiling:
                start = time.perf_counter()
                options.say("waiting for FlashInfer's kernels to compile")
                if trouble := loading.finish_compiling(compiling):
                    options.say(f"FlashInfer: {trouble}")
                    peers = [name for name in peers if "FlashInfer" not in name]
                self.phase("compile peers", start)
        finally:
            if compiling and compiling.poll() is None:
                loading.finish_compiling(compiling, 0)
        for case in good:
            row = next(row for row in self.rows if row["case"] == case.name)
            try:
                sets = self.build(case)
                self._time(sets, row)
                if peers:
                    self._peers(sets, peers, row)
                if options.sweep:
                    self._sweep(sets, row)
                del sets
            except Exception as error:
                self._failed(row, error)
            done(row)

    def _row(self, case: BenchCase) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(("case", "us", "read_us", "host_us", "exact_fraction", "rho"))
        row |= {"case": case.name, "peers": {}, "kv_bytes": case.kv_bytes, "sizes": accuracy.describe(case)}
        self.rows.append(row)
        return row

    def _check(self, case: BenchCase) -> bool:
        """Rows of our output against NumPy, the same bits 20 times, and where asked 10^6 outputs against float64."""
        start, options, row = time.perf_counter(), self.options, self._row(case)
        try:
            sets = self.build(case)
            call = prepare(sets, options.schedule)
            accuracy.check(sets, call)
            first = accuracy.on_host(call(0)).tobytes()
            if any(accuracy.on_host(call(0)).tobytes() != first for _ in range(SAME_BITS_CALLS - 1)):
                raise ValueError(f"{case.name}: expected the same bits from {SAME_BITS_CALLS} calls, got others")
            if options.accuracy:
                reference = accuracy.reference(sets, options.seed + 1)
                row["exact_fraction"], row["rho"] = reference.measure(sets, call)
                row["accuracy_outputs"] = reference.exact.size
                if options.peers:
                    self._references[case.name] = reference
        # One case that fails must not take the others' results with it.
        except Exception as error:
            self._failed(row, error)
        self.phase("check", start)
        return "error" not in row

    def _failed(self, row: dict[str, Any], error: Exception) -> None:
        row["error"] = f"{type(error).__name__}: {error}"
        self.options.say(f"{row['case']:<13} FAILED  {row['error']}")

    def _time(self, sets: PageSets, row: dict[str, Any]) -> None:
        start, repeats = time.perf_counter(), self.options.repeats
        row["path"], call = "DecodePlan.run", prepare(sets, self.options.schedule)
        before = [accuracy.on_host(call(i)).tobytes() for i in range(len(sets))]
        ours = timing.measure(call, len(sets), repeats)
        if before != [accuracy.on_host(out).tobytes() for out in sets.out]:
            row["error"] = "replays of the graph gave other bits than the calls did"
        row |= {"us": ours.us, "spread": ours.spread, "read_us": self._floor(sets), "page_sets": len(sets)}
        # Once more, after the floor: of two medians a moment apart the better one, as with the floor and the peers.
        row["us"] = min(row["us"], timing.measure(call, len(sets), repeats).us)
        row["apart_us"] = timing.measure_apart(call, len(sets), repeats)
        row["host_us"] = timing.host_us(call, len(sets))
        row["floor_share"] = row["read_us"] / row["us"]
        self.phase("time", start)

    def _floor(self, sets: PageSets) -> float:
        return floor.read_floor(sets.pools, sets.case.kv_bytes, len(sets), self.options.repeats)

    def _peers(self, sets: PageSets, names: Sequence[str], row: dict[str, Any]) -> None:
        start, options = time.perf_counter(), self.options
        peers = importlib.import_module("bench.peers")
        found = peers.compare(sets, options.peers_dir, names, self._references.pop(sets.case.name, None), options.repeats)
        row |= {
            "peers": found.us, "peers_apart_us": found.apart_us, "peers_host_us": found.host_us,
            "peers_variant": found.variant, "peers_errors": found.errors,
            "peers_accuracy": {name: {"exact_fraction": a, "rho": b} for name, (a, b) in found.accuracy.items()},
        }  # fmt: skip
        self.phase("peers", start)

    def _sweep(self, sets: PageSets, row: dict[str, Any]) -> None:
        """Times every split count of the two-launch schedule and what the planner would choose."""
        start, case, repeats = time.perf_counter(), sets.case, self.options.repeats
        sms = device_sms()
        row["sweep_us"], row["sms"] = {}, sms
        row["planned_splits"] = plan_splits(
            case.context_lens, page_size=case.page_size, num_q_heads=case.num_q_heads, num_kv_heads=case.num_kv_heads,
            num_sms=sms, **partial_blocks(sets.problem(0)),
        )  # fmt: skip
        for splits in sorted({*SWEEP_SPLITS, row["planned_splits"]}):
            call = prepare(sets, {"num_splits": splits})
            try:
                accuracy.check(sets, call, rows=1)
                row["sweep_us"][str(splits)] = timing.measure(call, len(sets), repeats).us
            except Exception as error:
                self.options.say(f"{case.name:<13} {splits} splits FAILED  {type(error).__name__}: {error}")
        row["auto_us"] = timing.measure(prepare(sets, {}), len(sets), repeats).us
        self.phase("sweep", start)

    def context(self, cases: Iterable[BenchCase]) -> dict[str, Any]:
        """Time against context, beside the floor's: both lines, and how far the points are from them."""
        start = time.perf_counter()
        points = [self._point(case) for case in cases]
        self.phase("context", start)
        return {"points": points, **context_fit(points)}

    def _point(self, case: BenchCase) -> dict[str, float]:
        sets = self.build(case)
        call = prepare(sets, self.options.schedule)
        accuracy.check(sets, call, rows=1)
        us = timing.settled(lambda: timing.measure(call, len(sets), self.options.repeats).us)
        read_us = self._floor(sets)
        self.options.say(f"{case.name:<13} {us:9.1f} us, floor {read_us:9.1f} us")
        return {"tokens": case.context_lens[0], "us": us, "read_us": read_us}


def context_fit(points: Sequence[dict[str, float]]) -> dict[str, float]:
    """The lines through us and read_us against tokens: start in us, slope in us per 1024 tokens, largest relative distance."""
    tokens = [point["tokens"] / 1024 for point in points]
    ours, read = (timing.affine_fit(tokens, [point[name] for point in points]) for name in ("us", "read_us"))
    return {
        "start_us": ours.start, "slope_us": ours.slope, "off": ours.off, "read_start_us": read.start,
        "read_slope_us": read.slope, "read_off": read.off, "slope_ratio": ours.slope / read.slope,
    }  # fmt: skip


def device_sms() -> int:
    """Multiprocessors of the current device."""
    import cupy

    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])
