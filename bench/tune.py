"""Configurations of the balanced kernel against each other: `python -m bench.tune`, on a GPU.

Every configuration is compiled, checked against float64 and timed on a cold cache in each case it suits, beside two floors: a
straight read of as many bytes, and a read of the very pages in the order of the page table. Stages can be left out of the
kernel's text to see what they cost (those results are wrong, and not checked).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cupy_kernels import jit, tensor_core
from cupy_kernels.tensor_core import Config

from . import accuracy, timing
from .cases import BenchCase, PageSets, build, select
from .floor import read_floor

# What is tried, by name, warps x blocks an SM: for up to 8 query heads a block, for 16, for small heads.
SMALL_GROUP = {
    "8x1": Config(8),
    "4x2": Config(4, 2),
    "12x1": Config(12),
    "4x3": Config(4, 3),
    "8x1-min2": Config(8, 1, 2),
}
LARGE_GROUP = {"8x1": Config(8), "4x2": Config(4, 2)}
SMALL_HEAD = {"8x2": Config(8, 2), "4x4": Config(4, 4), "16x1": Config(16), "8x1": Config(8)}

SCORES = """        float s[N_TILES][4];
        dots(s, slot, q, lane);
        if (first + TILE > tokens.end) hide_rows(s, tokens.end - 1 - first, lane);
        unsigned p[N_TILES][P_PARTS][2];
        weigh(p, state, s);
"""
PRODUCTS = "        accumulate(state, slot, p, lane);\n"
# Something has to be read, or the loads are left out too.
LOADS_ONLY = (
    ("stream.cuh", SCORES, ""),
    ("stream.cuh", PRODUCTS, "        state.acc[0][0][0] += *(float*)(slot + 4 * lane);\n"),
)
MERGE = "            if (merges) piece = merge_followers"
NO_MERGE = (
    ("balanced.cu", MERGE, "            if (batch_size < 0) piece = merge_followers"),
    ("balanced.cu", "if (writes && !begins_here) mailboxes", "if (batch_size < 0) mailboxes"),
)
CUT = "        Share share = cut_batch(run_units, batch, blockIdx.z, gridDim.z, Divider(share_divider), min_units);\n"
END = "        wait_for_previous_launch();\n        if (batch_size > 0) return;\n"
# Left out of a configuration, by suffix.
STAGES = {
    "": (),
    "/loads": LOADS_ONLY,
    "/loads,no merge": LOADS_ONLY + NO_MERGE,
    "/no merge": NO_MERGE,
    "/cut": (("balanced.cu", CUT, CUT + END),),
    "/empty": (("balanced.cu", CUT, END + CUT),),
}

PAGED_FLOOR = r"""
// Whole pages in the order of the page table, K then V of each: 256 threads take a page, 8 loads of 16 bytes a thread at once.
extern "C" __global__ void __launch_bounds__(256, 8) paged_floor(
    const uint4* k, const uint4* v, const int* pages, long long count, int vectors, unsigned* fold) {
    unsigned folded = 0;
    for (long long i = blockIdx.x; i < 2 * count; i += gridDim.x) {
        const uint4* page = (i % 2 ? v : k) + (long long)pages[i / 2] * vectors;
        for (int first = threadIdx.x; first < vectors; first += 8 * 256) {
            uint4 x[8];
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                x[j] = make_uint4(0, 0, 0, 0);
                if (first + j * 256 < vectors)
                    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(x[j].x), "=r"(x[j].y), "=r"(x[j].z), "=r"(x[j].w) : "l"(page + first + j * 256));
            }
            #pragma unroll
            for (int j = 0; j < 8; j++) folded ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
        }
    }
    if (folded == 0x9E3779B9u) *fold = folded;
}
"""


def configs(case: BenchCase, only: frozenset[str] = frozenset()) -> dict[str, Config]:
    """Those that suit the case; of these names, if any are given."""
    group = case.num_q_heads // case.num_kv_heads
    table = SMALL_HEAD if case.head_dim <= 64 else LARGE_GROUP if group > tensor_core.N_TILE else SMALL_GROUP
    return {name: config for name, config in table.items() if not only or name in only}


def paged_floor(sets: PageSets) -> float:
    """Microseconds to read the pages of a set, whole, in order. Only where they are full."""
    import cupy

    kernel = cupy.RawKernel(PAGED_FLOOR, "paged_floor", ("--std=c++17",))
    case, fold = sets.case, cupy.zeros(1, np.uint32)
    pages = [cupy.concatenate([table[b, :count] for b, count in enumerate(case.pages)]) for table in sets.page_tables]
    vectors = int(np.prod(sets.k_cache.shape[1:])) * sets.k_cache.itemsize // 16
    grid = (8 * int(cupy.cuda.Device().attributes["MultiProcessorCount"]),)

    def call(i: int) -> None:
        arguments = (sets.k_cache, sets.v_cache, pages[i], np.int64(pages[i].size), np.int32(vectors), fold)
        kernel(grid, (256,), arguments)

    return timing.settled(lambda: timing.measure(call, len(sets)).us)


def caller(sets: PageSets, config: Config) -> Callable[[int], Any]:
    """Enqueues the kernel on set i; the workspace is shared, as of one stream."""
    case, xp = sets.case, sets.xp
    sms = int(xp.cuda.Device().attributes["MultiProcessorCount"])
    grid = tensor_core.plan_grid(
        batch_size=case.batch_size, num_kv_heads=case.num_kv_heads, group_size=case.num_q_heads // case.num_kv_heads,
        head_dim=case.head_dim, num_sms=sms, config=config,
    )  # fmt: skip
    calls, workspace = [sets.problem(i) for i in range(len(sets))], tensor_core.Workspace.of(xp, grid)

    def call(i: int) -> Any:
        tensor_core.bind_balanced(calls[i], sets.out[i], sets.lse[i], grid, workspace)()
        return sets.out[i]

    call.workspace = workspace  # type: ignore[attr-defined]
    return call


def compile_all(cases: list[BenchCase], stages: dict[str, tuple], only: frozenset[str]) -> Iterator[str]:
    """Compiles what the cases need, side by side; yields a line a kernel."""

    def one(label: str, kernel: jit.Kernel) -> str:
        start = time.perf_counter()
        compiled = kernel._compiled(0)
        compiled.compile()
        used = f"{compiled.num_regs} registers, {compiled.local_size_bytes} bytes local, {compiled.shared_size_bytes} static"
        return f"{label}: {used}, {time.perf_counter() - start:.1f} s"

    wanted = {}
    for suffix, patches in stages.items():
        # A kernel takes its patches from the settings it is made under.
        with jit.settings(patches=patches):
            for case in cases:
                for name, config in configs(case, only).items():
                    group = case.num_q_heads // case.num_kv_heads
                    values = tensor_core.constants(case.dtype, case.dtype, case.head_dim, group, case.page_size, config)
                    kernel = jit.kernel("balanced.cu", "balanced", **values)
                    wanted[kernel] = f"D {case.head_dim}, group {group}, {name}{suffix}"
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        futures = {pool.submit(one, label, kernel): label for kernel, label in wanted.items()}
        for future in concurrent.futures.as_completed(futures):
            try:
                yield future.result()
            except Exception as error:
                yield f"{futures[future]}: {type(error).__name__}: {str(error)[-2000:]}"


def same_bits(sets: PageSets, call: Callable[[int], Any], repeats: int = 20) -> bool:
    """Whether repeats on set 0 give the same bits and leave the mailboxes empty."""
    first = call(0).copy()
    same = all(bool((call(0).view(np.uint8) == first.view(np.uint8)).all()) for _ in range(repeats))
    left = call.workspace.o_pieces.view(np.uint32)  # type: ignore[attr-defined]
    return same and bool((left == tensor_core.NOT_THERE).all())


def tune(
    case: BenchCase, stages: dict[str, tuple], *, only: frozenset[str], exact: bool, seed: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """One row a configuration and stage."""
    import cupy

    sets = build(case, cupy, seed)
    full = all(length % case.page_size == 0 for length in case.context_lens)
    floor = read_floor((sets.k_cache, sets.v_cache), case.kv_bytes, len(sets))
    paged = paged_floor(sets) if full else None
    say(f"{case.name}: read {floor:.1f} us, its pages {paged if paged is None else round(paged, 1)} us")
    reference = accuracy.reference(sets, seed) if exact else None
    for name, config in configs(case, only).items():
        for suffix, patches in stages.items():
            row: dict[str, Any] = {"case": case.name, "config": name + suffix, "read_us": floor, "pages_us": paged}
            try:
                with jit.settings(patches=patches):
                    call = caller(sets, config)
                    if not patches:
                        accuracy.check(sets, call, rows=1)
                        row["same_bits"] = same_bits(sets, call)
                    row["us"] = min(timing.measure(call, len(sets)).us for _ in range(2))
                    if not patches and reference is not None:
                        row["exact_fraction"], row["rho"] = reference.measure(sets, call)
                        reference = None if case.name != "1x1024" else reference
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            say("  " + format_row(row))
            yield row
    del sets
    cupy.get_default_memory_pool().free_all_blocks()


def format_row(row: dict[str, Any]) -> str:
    """A configuration in one line."""
    if "error" in row:
        return f"{row['config']:<18}{row['error']}"
    line = f"{row['config']:<18}{row['us']:8.1f} us  {100 * row['read_us'] / row['us']:5.1f} % of read"
    if row.get("same_bits") is False:
        line += "  BITS DIFFER"
    if "exact_fraction" in row:
        line += f"  exact {100 * row['exact_fraction']:.3f} %, rho {row['rho']:.4f}"
    return line


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("--cases", default="all", help="names of bench.cases, by commas")
    parser.add_argument("--configs", default="", help="names of configurations, by commas")
    parser.add_argument("--stages", action="store_true", help="also leave stages out")
    parser.add_argument("--exact", action="store_true", help="measure the share of correctly rounded outputs")
    parser.add_argument("--seconds", type=float, default=240, help="start no further case after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for tune.json")
    options = parser.parse_args()
    say = functools.partial(print, flush=True)
    start, cases = time.perf_counter(), select(options.cases)
    only = frozenset(name for name in options.configs.split(",") if name)
    stages = STAGES if options.stages else {"": ()}
    for line in compile_all(cases, stages, only):
        say(line)
    say(f"compiled after {time.perf_counter() - start:.0f} s")
    rows: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        if time.perf_counter() - start > options.seconds:
            say(f"{case.name}: no time left")
            continue
        for row in tune(case, stages, only=only, exact=options.exact, seed=options.seed, say=say):
            rows.append(row)
            (options.out / "tune.json").write_text(json.dumps(rows, indent=1))
    say(f"{time.perf_counter() - start:.0f} s\n")
    for case in cases:
        done = [row for row in rows if row["case"] == case.name and "us" in row and "/" not in row["config"]]
        if done:
            best = min(done, key=lambda row: row["us"])
            say(f"{case.name:<14}" + format_row(best))


if __name__ == "__main__":
    main()
