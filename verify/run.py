"""Runs cases through reference and kernels, judges each by the tiers, and pools them for the tiers that need many elements."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import reference
from cupy_kernels import jit

from . import kernels, ratchet
from .arithmetic import Arithmetic, rounding
from .assertion import same_pages
from .budget import Budget, decode_budget, partial_budget
from .cases import Case, build
from .lists import LISTS
from .peers import peers
from .population import Population
from .tiers import bitwise, compare
from .verdict import Report

# By depth: decodes of the same call again, and how many seeds each case runs with.
REPEATS = {"quick": 1, "full": 3}
# On a GPU, where a race may show in one run of many.
GPU_REPEATS = 20
SEEDS = {"quick": 1, "full": 5}
FEW = 4


@dataclass(frozen=True)
class Task:
    """One case on one device, ready to be sent to another process."""

    case: Case
    # of LISTS
    list_name: str
    device: str
    # as the report names it: measured function errors are kept by it
    device_name: str
    repeats: int = 1
    patches: jit.Patches = ()


@dataclass(frozen=True)
class Sample:
    """One case's elements for its pool, with the budget boiled down to what pools need."""

    arithmetic: Arithmetic
    out: np.ndarray
    want: np.ndarray
    budget: Budget
    measures: dict[str, float]


Judged = tuple[dict[str, Any], Sample | None]


def judge(task: Task) -> Judged:
    """The row of report.json for one case, and its elements. What raises is a failed row."""
    started = time.perf_counter()
    row = describe(task)
    try:
        found, sample = _judge(task)
    except Exception as error:
        found = {"verdict": "fail", "tiers": {}, "worst": None, "text": traceback.format_exc()}
        found["errors"], sample = {"exception": f"{type(error).__name__}: {error}"}, None
    if found["verdict"] == "pass":
        # Thousands of rows: what the comparator says of each goes into the report only where something is wrong.
        found.pop("text")
    return {**row, **found, "seconds": round(time.perf_counter() - started, 3)}, sample


def describe(task: Task) -> dict[str, Any]:
    """Which case it is, and the command that runs it alone."""
    case = task.case
    return {
        "name": case.name,
        "list": task.list_name,
        "family": case.family,
        "seed": case.seed,
        "device": task.device,
        "schedule": case.schedule,
        "kernel": "tensor cores" if case.on_tensor_cores else "readable",
        "dtype": case.dtype,
        "case": repr(case),
        "reproduce": f"python -m verify --case {case.name} --seed {case.seed} --device {task.device}",
    }


def _judge(task: Task) -> tuple[dict[str, Any], Sample]:
    case = task.case
    inputs = build(case)
    how = kernels.arithmetic(case, task.device_name if task.device == "gpu" else None)
    made = kernels.outputs(case, inputs, task.device, repeats=task.repeats, patches=task.patches)
    want = reference.paged_decode(**inputs.call())
    orders = kernels.orders(case, inputs, made, how)
    budget = decode_budget(inputs, how, orders)
    same_pages(budget, want)
    partial = None
    if made.partial is not None and len(orders):
        # Orders of the whole may have a split more than the kernel made.
        cut = [order[: made.partial[0].shape[2]] for order in orders]
        partial = (*made.partial, partial_budget(inputs, how, cut))
    report = compare(*made.decode, budget, how, inputs=inputs, family=case.family, reference=want, partial=partial)
    report = report.with_verdict(bitwise([made.decode, *made.again]))
    found = {**report.to_json(), "errors": errors(*made.decode, want, budget, how), "text": str(report)}
    found["peers"] = peers(made.decode[0], want[0], inputs)
    for algorithm, (out, lse) in made.merged.items():
        merged = replace(how, merge=algorithm)
        bound = budget if algorithm == how.merge else decode_budget(inputs, merged, orders)
        verdicts = compare(out, lse, bound, merged, reference=want)
        found = _add_merge(found, algorithm, verdicts)
    slim = replace(
        budget,
        terms=np.stack([budget.before_rounding, budget.terms[..., -1]], axis=-1),
        lse_terms=budget.lse_terms[..., -1:],
    )
    return found, Sample(how, made.decode[0], want[0], slim, report.measures)


def _add_merge(found: dict[str, Any], algorithm: str, report: Report) -> dict[str, Any]:
    """`split_decode` and `merge_states` by hand: the same tiers again, shown only if they fail."""
    ratio = report.verdicts["T1"].ratio
    found = {**found, "merge": {**found.get("merge", {}), algorithm: ratio}}
    if report.passed:
        return found
    return {**found, "verdict": "fail", "text": f"{found['text']}\nmerge_states, {algorithm}:\n{report}"}


def errors(
    out: np.ndarray, lse: np.ndarray, want: tuple[np.ndarray, np.ndarray], budget: Budget, how: Arithmetic
) -> dict[str, Any]:
    """The figures of a case's line, each the worst of all elements."""
    got, (exact, exact_lse) = out.astype(np.float64), want
    with np.errstate(invalid="ignore", divide="ignore"):
        error, lse_error = np.abs(got - exact), np.abs(lse.astype(np.float64) - exact_lse)
        worst = lambda x, size=1.0: float(np.max(np.divide(x, size), where=np.isfinite(x) & (x > 0), initial=0))
        return {
            "max_abs": worst(error),
            # of the rounding that a perfect output has at most
            "roundoffs": worst(error, rounding(exact, how.out_dtype)),
            "of_sum_p_v": worst(error, budget.magnitude),
            "lse": worst(lse_error),
            "non_finite": int(
                (np.isfinite(got) != np.isfinite(exact)).sum() + (np.isfinite(lse) != np.isfinite(exact_lse)).sum()
            ),
            "elements": int(out.size),
        }


def pools(samples: Iterable[tuple[Case, Sample]]) -> list[dict[str, Any]]:
    """Rows of T3, T3b and T4, over all elements of a family that are rounded alike."""
    groups: dict[tuple[str, str], list[tuple[Case, Sample]]] = defaultdict(list)
    for case, sample in samples:
        groups[case.family, _pool(case, sample.arithmetic)].append((case, sample))
    rows = []
    for (family, pool), members in sorted(groups.items()):
        case, parts = members[0][0], [sample for _, sample in members]
        how = parts[0].arithmetic
        flat = [_rows(sample.budget) for sample in parts]
        budget = Budget.combine(flat, (sum(len(x.lse) for x in flat),))
        out, want = (np.concatenate([getattr(x, name).reshape(-1, case.head_dim) for x in parts]) for name in ("out", "want"))
        population = Population(out, out.astype(np.float64), want, budget, how)
        report = Report({v.tier: v for v in (population.rms(), population.lean(), population.fraction(family))}, {})
        measures = {**population.measures, "ratio": max(x.measures["ratio"] for x in parts)}
        rows.append({
            "name": f"{family}: {pool}", "family": family, "dtype": case.dtype, "elements": int(out.size), "cases": len(parts),
            "measures": measures, **report.to_json(), "text": str(report),
        })  # fmt: skip
    return rows


def _pool(case: Case, how: Arithmetic) -> str:
    """What the elements of a pool have in common, besides the family."""
    stored = f", o {how.partial_dtype}" if how.partial_dtype != "float32" else ""
    kernel = f", tensor cores, P {how.p}" if case.on_tensor_cores else ""
    return f"{case.dtype} to {how.out_dtype}, D {case.head_dim}{stored}{kernel}"


def _rows(budget: Budget) -> Budget:
    """The leading axes as one."""
    count = budget.lse.size
    return Budget(*(x.reshape(count, *x.shape[budget.lse.ndim :]) for x in vars(budget).values()))


def choose(lists: Sequence[str], names: Sequence[str], seed: int | None, depth: str) -> list[tuple[str, Case]]:
    """Cases with the list they are of. ValueError for an unknown list or case, naming those that exist."""
    known = {case.name: (name, case) for name, cases in LISTS.items() for case in cases}
    for what, wanted, have in (("cases", lists, list(LISTS)), ("case", names, list(known))):
        if unknown := [name for name in wanted if name not in have]:
            raise ValueError(f"{what}: expected names among {', '.join(have)}; got {', '.join(unknown)}")
    if names:
        return [(known[name][0], replace(known[name][1], seed=known[name][1].seed if seed is None else seed)) for name in names]
    cases = [(name, case) for name in lists for case in LISTS[name]]
    if seed is not None:
        return [(name, replace(case, seed=seed)) for name, case in cases]
    return [(name, replace(case, seed=case.seed + i)) for i in range(SEEDS[depth]) for name, case in cases]


def workers() -> int:
    """Processes that share the work: references and budgets are NumPy's even where the kernels are not."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)


def run(tasks: Sequence[Task], processes: int, done: Callable[[], None] = lambda: None) -> list[Judged]:
    """Judges every task, in other processes unless they are few; calls `done` after each."""
    if processes == 1 or len(tasks) <= FEW:
        return [_then(done, judge(task)) for task in tasks]
    # One thread of linear algebra in each process: the processes are the parallelism.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Spawned: a forked process must not use the parent's CUDA.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(judge, task) for task in tasks]
        for _ in as_completed(futures):
            done()
        return [future.result() for future in futures]


def _then(done: Callable[[], None], result: Judged) -> Judged:
    done()
    return result


def check_ratchet(rows: list[dict[str, Any]], device_name: str, configuration: str) -> None:
    """Adds T8 to the pools' rows: `configuration` says which cases were run, for only like compares with like."""
    records = ratchet.load(ratchet.RATCHET)
    for row in rows:
        verdict = ratchet.check(records, ratchet_device(device_name), f"{configuration}: {row['name']}", row["measures"])
        row["tiers"]["T8"] = {"verdict": verdict.verdict, "ratio": verdict.ratio}
        row["text"] += f"\n{verdict}"
        if verdict.verdict == "fail":
            row["verdict"] = "fail"


def renew_ratchet(rows: list[dict[str, Any]], device_name: str, configuration: str) -> None:
    """Records what the pools measured."""
    found = {f"{configuration}: {row['name']}": row["measures"] for row in rows}
    ratchet.renew(ratchet_device(device_name), found, ratchet.RATCHET)


def ratchet_device(device_name: str) -> str:
    """The stand-in computes the same on every processor."""
    return device_name.partition(" (")[0]
