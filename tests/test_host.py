"""The CPU stand-in for CUDA: turns, barriers, deadlocks, sanitizers, shared memory. NumPy only."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same_bits, decode, launch, paged

from cupy_kernels import jit, merge_state_in_place, merge_states, paged_decode, split_decode
from cupy_kernels.host import build

ROOT = Path(__file__).parents[1]
SEEDS = range(1, 9)
BARRIER = "        __syncthreads();\n"
# Barriers whose lack changes the result: after the scores, before V takes K's place in the tile; before K takes V's.
MISSING_BARRIERS = {
    "V over K": ("partial.cu", BARRIER + "        load_tile(tile, v_cache", "        load_tile(tile, v_cache"),
    "K over V": ("partial.cu", BARRIER + "        load_tile(tile, k_cache", "        load_tile(tile, k_cache"),
    "K unread": ("partial.cu", BARRIER + "        for (int h = warp;", "        for (int h = warp;"),
    "V unread": ("partial.cu", BARRIER + "        for (int i = threadIdx.x;", "        for (int i = threadIdx.x;"),
}


def attend(**options):
    return decode(np, paged((100, 0, 37), num_q_heads=10, num_kv_heads=2, head_dim=64), **options)


class TestOrder:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("options", [{"num_splits": 1}, {"num_splits": 3}, {"schedule": "fixed", "pages_per_split": 2}])
    def test_any_order_gives_the_same_bits(self, seed, options):
        want = attend(**options)
        with jit.settings(seed=seed):
            assert_same_bits(attend(**options), want)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_in_place_merge(self, seed):
        def merged():
            o, lse = np.random.default_rng(0).standard_normal((2, 3, 200)).astype(np.float32), np.zeros((2, 3), np.float32)
            merge_state_in_place(o[0], lse[0], o[1], lse[1] + 1)
            return o[0], lse[0]

        want = merged()
        with jit.settings(seed=seed):
            assert_same_bits(merged(), want)

    @pytest.mark.parametrize("fault", MISSING_BARRIERS)
    def test_a_missing_barrier_is_exposed(self, fault):
        with jit.settings(readable=True):
            want = attend(num_splits=2)
        differ = 0
        for seed in SEEDS:
            with jit.settings(seed=seed, readable=True, patches=[MISSING_BARRIERS[fault]]):
                got = attend(num_splits=2)
            differ += not np.array_equal(got[0], want[0])
        assert differ

    def test_a_missing_barrier_in_the_merge_is_exposed(self):
        o, lse = np.random.default_rng(0).standard_normal((2, 1, 200)).astype(np.float32), np.zeros((2, 1), np.float32)
        want = o.copy(), lse.copy()
        merge_state_in_place(want[0][0], want[1][0], o[1], lse[1] + 1)
        fault = ("merge.cu", "    __syncwarp();\n", "")
        with jit.settings(patches=[fault]):
            merge_state_in_place(o[0], lse[0], o[1], lse[1] + 1)
        assert not np.array_equal(o[0], want[0][0])

    def test_a_missing_barrier_among_the_warps_of_a_merge_is_exposed(self):
        o, lse = np.random.default_rng(0).standard_normal((3, 40, 32)).astype(np.float32), np.zeros((3, 40), np.float32)
        want = merge_states(o, lse)[0]
        fault = ("merge.cu", "        __syncthreads();\n        if (way > 0) return;\n", "        if (way > 0) return;\n")
        differ = 0
        for seed in SEEDS:
            with jit.settings(seed=seed):
                np.testing.assert_array_equal(merge_states(o, lse)[0], want)
            with jit.settings(seed=seed, patches=[fault]):
                differ += not np.array_equal(merge_states(o, lse)[0], want)
        assert differ

    def test_orders_differ_and_visit_each_block_and_thread_once(self):
        text = """extern "C" __global__ void visit(int* order, int* next) {
            const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
            order[(*next)++] = block * blockDim.x + threadIdx.x;
        }"""
        orders = set()
        for seed in range(6):
            order, start = np.full(2 * 3 * 5 * 64, -1, np.int32), np.zeros(1, np.int32)
            assert launch(text, "visit", 64, order, start, grid=(2, 3, 5), seed=seed) == 0
            assert sorted(order) == list(range(len(order)))
            assert (seed == 0) == (list(order) == sorted(order))
            orders.add(order.tobytes())
        assert len(orders) == 6


class TestDeadlock:
    # half a warp waits for the block, the other half for its warp
    FAULT = (
        "partial.cu",
        BARRIER + "        for (int h = warp;",
        "        if (lane < 16) __syncthreads();\n        for (int h = warp;",
    )

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_a_barrier_that_some_threads_skip(self, seed):
        args = paged((37,))
        with jit.settings(seed=seed, patches=[self.FAULT]):
            with pytest.raises(RuntimeError, match=r"^partial: a block deadlocked: some of its threads wait for others"):
                split_decode(**args, num_splits=1)
            # the next launch of the same library starts afresh: a request without tokens meets no such barrier
            args["context_lens"][:] = 0
            assert np.all(paged_decode(**args, num_splits=1)[1] == -np.inf)

    def test_a_shuffle_that_a_lane_skips(self):
        text = """extern "C" __global__ void skip(float* x) {
            if (threadIdx.x != 5) x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
            __syncthreads();
            x[threadIdx.x] += 1;
        }"""
        assert launch(text, "skip", 64, np.zeros(64, np.float32)) == 1

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_what_all_threads_agree_on(self, seed):
        # Time and again, and threads go on at once: a result must not be the next one's.
        text = """extern "C" __global__ void agree(int* x) {
            for (int i = 0; i < 50; i++) {
                const bool mine = i % 3 != 0 || (int)threadIdx.x != i;
                x[50 * threadIdx.x + i] = __syncthreads_and(mine);
            }
        }"""
        x = np.full((64, 50), -1, np.int32)
        assert launch(text, "agree", 64, x, seed=seed) == 0
        assert np.array_equal(x, np.tile(np.arange(50) % 3 != 0, (64, 1)))

    def test_threads_that_returned_are_not_waited_for(self):
        text = """extern "C" __global__ void leave(float* x) {
            if (threadIdx.x >= 40) return;
            __syncthreads();
            x[threadIdx.x] = 1;
        }"""
        x = np.zeros(64, np.float32)
        assert launch(text, "leave", 64, x) == 0
        assert np.array_equal(x, np.arange(64) < 40)


def test_shared_memory_starts_as_nan_in_every_block():
    text = """extern "C" __global__ void look(float* x) {
        DYNAMIC_SHARED(float, dynamic);
        __shared__ float fixed[32];
        x[64 * blockIdx.x + threadIdx.x] = fixed[threadIdx.x];
        x[64 * blockIdx.x + 32 + threadIdx.x] = dynamic[threadIdx.x];
        __syncthreads();
        fixed[threadIdx.x] = dynamic[threadIdx.x] = 0;
    }"""
    x = np.zeros(3 * 64, np.float32)
    for _ in range(2):
        assert launch(text, "look", 32, x, grid=(3, 1, 1), shared_bytes=128) == 0
        assert np.all(np.isnan(x))
        x[:] = 0


def test_a_text_that_does_not_compile_says_why():
    with pytest.raises(RuntimeError, match=r"(?s)^the C\+\+ compiler failed: .*no_such_name"):
        launch('extern "C" __global__ void broken(float* x) { *x = no_such_name; }', "broken", 1, np.zeros(1, np.float32))


# Runs in a process of its own, under AddressSanitizer and UBSan; the first argument says what fault to plant.
SANITIZED = """
import sys
import numpy as np
sys.path[:0] = ["tests", "."]
from helpers import paged
from cupy_kernels import jit, merge_state_in_place, merge_states, paged_decode, split_decode

FAULTS = {
    "none": (),
    "table": (("pages.cuh", "return page_table[token / page_size]", "return page_table[token / page_size + 1]"),),
    "shared": (("partial.cu", "tile[t * (head_dim + 1) + d] =", "tile[t * (head_dim + 2) + d] ="),),
    "overflow": (("pages.cuh", "return page_table",
                  "volatile int most = 0x7fffffff; if (most + token < -9) return 0; return page_table"),),
    # The last request of a share has no next one.
    "next q": (("balanced.cu", "if (next.request >= 0) ask_for_q", "if (true) ask_for_q"),),
}
with jit.settings(sanitize=True, seed=3, patches=FAULTS[sys.argv[1]]):
    for layout, lens in (("HND", (33,)), ("NHD", (37, 0, 100))):
        args = paged(lens, num_q_heads=6, dtype="float32", layout=layout, extra_entries=0)
        # arrays of exactly their size on the heap, so that one element outside is outside
        args = {name: array.copy() for name, array in args.items()}
        for schedule in ({"num_splits": 1}, {"num_splits": 3}, {"schedule": "fixed", "pages_per_split": 2}):
            paged_decode(**args, layout=layout, **schedule)
        o, lse = split_decode(**args, layout=layout, num_splits=3)
        merge_states(o, lse, algorithm="online")
        merge_state_in_place(o[:, :, 0], lse[:, :, 0], o[:, :, 1], lse[:, :, 1], mask=lse[:, :, 1] > 0)
    args = paged((37, 0, 100), num_q_heads=6, head_dim=64, extra_entries=0)
    paged_decode(**{name: array.copy() for name, array in args.items()})
print("finished")
"""


def sanitized(fault):
    compiler = build.find_compiler()
    libasan = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(libasan):
        pytest.skip(f"{compiler[0]} has no libasan.so")
    environment = {**os.environ, "LD_PRELOAD": libasan, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-c", SANITIZED, fault]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


class TestSanitizers:
    def test_clean(self):
        done = sanitized("none")
        assert done.stdout == "finished\n", done.stderr
        assert done.returncode == 0
        assert "ERROR" not in done.stderr
        assert "runtime error" not in done.stderr

    @pytest.mark.parametrize(
        ("fault", "text"),
        [
            ("table", "AddressSanitizer: heap-buffer-overflow"),
            ("shared", "AddressSanitizer: use-after-poison"),
            ("overflow", "runtime error: signed integer overflow"),
            ("next q", "AddressSanitizer: heap-buffer-overflow"),
        ],
    )
    def test_planted_fault_is_caught(self, fault, text):
        done = sanitized(fault)
        assert done.returncode != 0
        assert "finished" not in done.stdout
        assert text in done.stderr
