"""The command line: `python -m bench decode`, `merge`, `context`."""

from __future__ import annotations

import argparse
import importlib
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from verify.environment import environment, no_gpu_reason

from . import merge, report, timing
from .cases import COLD_BYTES, CONTEXT_CASES, DTYPES, SWEEP_CASES, BenchCase, select
from .decode import Bench, Options

FREE_FLAGS = ("batch_size", "context_len", "num_q_heads", "num_kv_heads", "head_dim", "page_size", "dtype", "layout")


def parser() -> argparse.ArgumentParser:
    """All flags."""
    top = argparse.ArgumentParser(prog="python -m bench", description="Checks, then times, beside the read floor and peers.")
    commands = top.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--repeats", type=_positive, default=timing.REPEATS, help="replays a median is taken of")
    common.add_argument("--seed", type=int, help="of the inputs; without it, fresh ones")
    common.add_argument("--out", type=Path, default=Path("bench-report"), help="folder of bench.json, .csv, .png")

    schedule = argparse.ArgumentParser(add_help=False)
    schedule.add_argument("--schedule", choices=("auto", "uniform", "fixed", "balanced"), default="auto")
    schedule.add_argument("--num-splits", type=_positive, help="of the uniform schedule")
    schedule.add_argument("--pages-per-split", type=_positive, help="of the fixed schedule")

    decode = commands.add_parser("decode", parents=[common, schedule], help="paged_decode")
    decode.add_argument("--cases", help="all, none, or names with commas between; without sizes or --sweep, all")
    decode.add_argument("--sweep", action="store_true", help=f"time over splits; without cases, of {', '.join(SWEEP_CASES)}")
    decode.add_argument("--context", action="store_true", help="time against context, too")
    decode.add_argument("--accuracy", action="store_true", help="10^6 outputs a case against float64")
    decode.add_argument("--peers", action="store_true", help="what is installed of other projects' kernels (needs torch)")
    decode.add_argument("--peers-dir", type=Path, help="folder of loose files of peers")
    free = decode.add_argument_group("a case of your own")
    free.add_argument("--batch-size", type=_positive)
    free.add_argument("--context-len", type=_positive, nargs="+", help="one length, or one for each request")
    for flag in ("--num-q-heads", "--num-kv-heads", "--head-dim", "--page-size"):
        free.add_argument(flag, type=_positive)
    free.add_argument("--dtype", choices=tuple(DTYPES))
    free.add_argument("--layout", choices=("NHD", "HND"))

    commands.add_parser("context", parents=[common, schedule], help="time against context, 32 k to 1 M tokens")
    states = commands.add_parser("merge", parents=[common], help="merge_states")
    for flag in ("--rows", "--num-states", "--head-dim"):
        states.add_argument(flag, type=_positive)
    states.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    return top


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def free_case(arguments: argparse.Namespace) -> BenchCase | None:
    """The case that sizes on the command line describe; None without any."""
    given = {name: getattr(arguments, name) for name in FREE_FLAGS if getattr(arguments, name) is not None}
    if not given:
        return None
    lens = given.pop("context_len", [1024])
    batch_size = given.pop("batch_size", len(lens))
    if len(lens) not in (1, batch_size):
        raise ValueError(f"context-len: expected 1 or {batch_size} lengths, got {len(lens)}")
    name = f"{batch_size}x{lens[0]}" if len(set(lens)) == 1 else f"{batch_size}-lengths"
    short = {"num_q_heads": "q", "num_kv_heads": "kv", "head_dim": "d", "page_size": "p", "dtype": "", "layout": ""}
    name += "".join(f"-{short[flag]}{value}" for flag, value in given.items())
    return BenchCase(name, tuple(lens) * (batch_size // len(lens)), **given)


def schedule_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of paged_decode; none for the automatic choice."""
    chosen = {name: getattr(arguments, name) for name in ("num_splits", "pages_per_split") if getattr(arguments, name)}
    name = arguments.schedule
    if name == "auto" and chosen:
        name = "uniform" if "num_splits" in chosen else "fixed"
    return chosen if name == "auto" else {"schedule": name, **chosen}


def main(words: Sequence[str] | None = None, xp: ModuleType | None = None, cold_bytes: int = COLD_BYTES) -> int:
    """Exit status: 0, 1 where a result is wrong, 2 where nothing could be run. `xp` and `cold_bytes` are for tests."""
    arguments = parser().parse_args(words)
    began = time.perf_counter()
    say = lambda text: print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)
    try:
        where: dict[str, Any] = {}
        peers: ModuleType | None = None
        if getattr(arguments, "peers", False):
            try:
                peers = importlib.import_module("bench.peers")
            except ImportError as error:
                raise ValueError(f"--peers needs torch, which is imported for it and for nothing else: {error}") from error
        if xp is None and (reason := no_gpu_reason()):
            raise ValueError(reason)
        where = environment("gpu" if xp is None else "cpu")
        where["seed"] = secrets.randbits(31) if arguments.seed is None else arguments.seed
        where["command"] = ["bench", *(sys.argv[1:] if words is None else words)]
        if peers:
            where["peers"] = peers.versions(arguments.peers_dir)
        result = {"environment": where, "rows": []}
        run = {"decode": run_decode, "context": run_decode, "merge": run_merge}[arguments.command]
        run(arguments, result, peers, xp, cold_bytes, say)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    where["seconds"] = {**where.get("seconds", {}), "all": round(time.perf_counter() - began, 1)}
    print(report.tables(result))
    print("seconds: " + ", ".join(f"{name} {seconds}" for name, seconds in where["seconds"].items()))
    print("written: " + ", ".join(map(str, report.write(result, arguments.out))))
    return int(any("error" in row for row in result["rows"]))


def run_decode(
    arguments: argparse.Namespace, result: dict[str, Any], peers: ModuleType | None, xp: ModuleType | None, cold_bytes: int,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """`decode` and `context`."""
    cases: list[BenchCase] = []
    options = Options(
        schedule=schedule_of(arguments), repeats=arguments.repeats, seed=result["environment"]["seed"], xp=xp,
        cold_bytes=cold_bytes, say=say,
    )  # fmt: skip
    if arguments.command == "decode":
        options.peers = tuple(peers.PEERS) if peers else ()
        own = free_case(arguments)
        named = arguments.cases or ("none" if own else ",".join(SWEEP_CASES) if arguments.sweep else "all")
        cases = ([] if named == "none" else select(named)) + ([own] if own else [])
        options.accuracy, options.sweep, options.peers_dir = arguments.accuracy, arguments.sweep, arguments.peers_dir
    bench = Bench(options)
    result["rows"] = bench.rows

    def done(row: dict[str, Any]) -> None:
        say(report.line(row))
        # What is measured is kept, even if a later kernel takes the device down.
        report.write(result, arguments.out)

    say(f"{len(cases)} cases, repeats {options.repeats}, seed {options.seed}")
    bench.decode(cases, done)
    if arguments.command == "context" or arguments.context:
        result["context"] = bench.context(CONTEXT_CASES)
    result["environment"]["seconds"] = bench.phases


def run_merge(
    arguments: argparse.Namespace, result: dict[str, Any], peers: ModuleType | None, xp: ModuleType | None, cold_bytes: int,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """`merge`."""
    own = merge.MergeCase(arguments.rows or 2048, arguments.num_states or 4, arguments.head_dim or 128, arguments.dtype)
    given = arguments.rows or arguments.num_states or arguments.head_dim or arguments.dtype != "float32"
    module = xp or importlib.import_module("cupy")
    for case in (own,) if given else merge.MERGE_CASES:
        row = merge.run(case, module, result["environment"]["seed"], arguments.repeats, cold_bytes)
        result["rows"].append(row)
        say(report.line(row))


if __name__ == "__main__":
    sys.exit(main())
