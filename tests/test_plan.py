"""split_ranges and plan_splits: host integers in and out, no array, no device."""

import heapq
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import paged
from hypothesis import example, given
from hypothesis import strategies as st

import reference
from bench.cases import ragged_lens
from cupy_kernels import plan_splits, split_ranges
from cupy_kernels.decode import choose_cut, partial_blocks
from cupy_kernels.problem import NOT_YET, check_problem

ROOT = Path(__file__).parents[1]
SMS = (48, 82, 108, 132, 148, 170)
HEADS = {"num_q_heads": 32, "num_kv_heads": 8}


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(1, 200))
@example(0, 1, 1)
@example(48, 16, 3)
@example(49, 16, 3)
def test_split_ranges_is_the_reference(context_len, page_size, num_splits):
    ranges = split_ranges(context_len, page_size, num_splits)
    assert ranges == reference.split_ranges(context_len, page_size, num_splits)
    # half open, in order, each page once
    pages = [page for begin, end in ranges for page in range(begin, end)]
    assert pages == list(range(-(-context_len // page_size)))
    assert all(begin <= end for begin, end in ranges)
    assert all(type(page) is int for pair in ranges for page in pair)


def test_split_ranges_of_the_longest_context():
    # 2^31 - 1 tokens: nothing in between may be a 32-bit or floating-point number
    pages = 2**31 - 1
    assert split_ranges(2**31 - 1, 1, 3) == [(0, 715827883), (715827883, 1431655766), (1431655766, pages)]


@pytest.mark.parametrize("num_sms", SMS)
@given(
    st.lists(st.integers(0, 200_000), max_size=80), st.sampled_from((1, 16, 64)), st.integers(1, 16), st.sampled_from((1, 4, 40)),
    st.sampled_from((None, 1, 2, 9)),
)  # fmt: skip
def test_no_more_splits_than_pages(num_sms, lens, page_size, num_kv_heads, group, blocks_per_sm):
    sizes = {"page_size": page_size, "num_q_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads, "num_sms": num_sms}
    splits = plan_splits(lens, **sizes, blocks_per_sm=blocks_per_sm)
    assert type(splits) is int
    assert 1 <= splits <= max(1, -(-max(lens, default=0) // page_size))


@pytest.mark.parametrize("num_sms", SMS)
class TestDevices:
    """The rule: blocks a few times the SM count, several pages in every split."""

    @pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 16])
    def test_long_contexts_fill_the_device(self, num_sms, batch_size):
        blocks = 8 * batch_size
        splits = plan_splits([32768] * batch_size, page_size=16, num_sms=num_sms, **HEADS)
        if blocks >= 3 * num_sms:
            assert splits == 1
        else:
            # the next power of two above four blocks an SM, or what the pages allow
            assert 2 * num_sms <= blocks * splits <= 8 * num_sms or (splits == 64 and blocks * splits < 8 * num_sms)
            assert 2048 / splits >= 8

    def test_enough_requests_are_not_split(self, num_sms):
        batch_size = -(-3 * num_sms // 8)
        assert plan_splits([4096] * batch_size, page_size=16, num_sms=num_sms, **HEADS) == 1
        assert plan_splits([4096] * (batch_size // 2), page_size=16, num_sms=num_sms, **HEADS) > 1

    def test_the_device_decides_at_its_own_size(self, num_sms):
        # one request more than three blocks an SM: the planner must not believe in another device
        wide = {"page_size": 16, "num_q_heads": 8, "num_kv_heads": 1}
        assert plan_splits([8192] * (3 * num_sms), num_sms=num_sms, **wide) == 1
        assert plan_splits([8192] * (3 * num_sms - 1), num_sms=num_sms, **wide) == 2

    def test_short_contexts_stay_whole(self, num_sms):
        for tokens in (0, 1, 16):
            assert plan_splits([tokens] * 4, page_size=16, num_sms=num_sms, **HEADS) == 1
        # every split keeps at least as many pages as the merge has states to read
        for tokens in (17, 64, 100, 500, 1000, 5000):
            splits = plan_splits([tokens], page_size=16, num_sms=num_sms, **HEADS)
            assert splits <= max(1, 2 * -(-tokens // 16) / splits)

    def test_one_long_request_among_44(self, num_sms):
        # the others are nearly nothing beside it: it must be cut as if it had little company
        long = plan_splits([50_000] + [1000] * 43, page_size=16, num_sms=num_sms, **HEADS)
        assert long == plan_splits([50_000] * 2, page_size=16, num_sms=num_sms, **HEADS)
        assert long >= 16
        assert plan_splits([1000] * 44, page_size=16, num_sms=num_sms, **HEADS) <= 4

    def test_more_requests_never_raise_the_splits(self, num_sms):
        plans = [plan_splits([8192] * n, page_size=16, num_sms=num_sms, **HEADS) for n in range(1, 70)]
        assert plans == sorted(plans, reverse=True)


# Times of pass 1 and merge on an H200 (132 SMs, 2026-11-30), page 16, float16: lengths, query and KV heads, blocks an SM, and the
# split counts within 3 % of the best of 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 64 and 128.
H200 = {
    "1x32768": ([32768], 32, 8, 1, {16}),
    "8x4096": ([4096] * 8, 32, 8, 1, {2}),
    "8x4096, 2": ([4096] * 8, 32, 8, 2, {4}),
    "64x1024": ([1024] * 64, 32, 8, 2, {1}),
    "1x1024": ([1024], 32, 8, 1, {8, 10, 12, 16}),
    "3x16384": ([16384] * 3, 32, 8, 1, {4, 5}),
    "9x8192": ([8192] * 9, 32, 8, 1, {3, 5}),
    "18x4096": ([4096] * 18, 32, 8, 1, {3, 4, 5}),
    "18x4096, 2": ([4096] * 18, 32, 8, 2, {3, 5}),
    "18x16384": ([16384] * 18, 32, 8, 1, {4, 5, 6, 8, 10}),
    "33x2048": ([2048] * 33, 32, 8, 2, {1}),
    "16x8192-g8": ([8192] * 16, 64, 8, 1, {1}),
    "8x8192-g16": ([8192] * 8, 128, 8, 1, {2}),
    "4x4096-mha": ([4096] * 4, 32, 32, 1, {1}),
    "4x4096-mha, 2": ([4096] * 4, 32, 32, 2, {2}),
    "64-ragged": (ragged_lens(), 32, 8, 2, {4, 5, 6, 8}),
    # the readable kernel, of 1, 2, 4, 8, 16, 32, 64, 128 and 256
    "readable-1x32768": ([32768], 32, 8, 9, {128, 256}),
    "readable-8x4096": ([4096] * 8, 32, 8, 9, {16, 32, 64}),
    "readable-64x1024": ([1024] * 64, 32, 8, 9, {4, 8, 16}),
}


@pytest.mark.parametrize("name", H200)
def test_the_plan_is_among_the_best_that_were_measured(name):
    lens, num_q_heads, num_kv_heads, blocks_per_sm, best = H200[name]
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
    assert plan_splits(lens, page_size=16, num_sms=132, blocks_per_sm=blocks_per_sm, **heads) in best


def simulated_time(lens, num_splits, num_sms, blocks_per_sm, num_kv_heads=8):
    """Blocks that start in order as places become free and share the memory, each up to 1 / 0.6 times as fast when alone."""
    places = num_sms * blocks_per_sm
    cuts = [split_ranges(n, 16, num_splits) for n in lens]
    blocks = [
        16 * (end - begin) + 250 / blocks_per_sm**2 for ranges in zip(*cuts, strict=True) for begin, end in ranges
        for _ in range(num_kv_heads)
    ]  # fmt: skip
    # All that run have the same speed: done is how far one that began with the first would be.
    running, done, time = [], 0.0, 0.0
    waiting = iter(blocks)
    for size in waiting:
        heapq.heappush(running, done + size)
        if len(running) < places:
            continue
        first = heapq.heappop(running)
        time, done = time + (first - done), first
    while running:
        share = max(0.6, len(running) / places)
        first = heapq.heappop(running)
        time, done = time + (first - done) * share, first
    return blocks_per_sm * time + (num_splits > 1) * (250 + 8 * num_splits)


@pytest.mark.parametrize("num_sms", SMS)
@pytest.mark.parametrize("blocks_per_sm", [1, 2, 9])
class TestTurns:
    """With the kernel's blocks an SM."""

    def plan(self, lens, num_sms, blocks_per_sm):
        return plan_splits(lens, page_size=16, num_sms=num_sms, blocks_per_sm=blocks_per_sm, **HEADS)

    @pytest.mark.parametrize(
        "lens",
        [[32768], [16384] * 3, [4096] * 8, [8192] * 9, [4096] * 18, [1024] * 64, [50_000] + [1000] * 43, [5000],
         [8192, 4096, 2048, 1024] * 4, ragged_lens()],
        ids=lambda lens: f"{len(lens)}x{max(lens)}",
    )  # fmt: skip
    def test_no_other_number_is_much_faster(self, num_sms, blocks_per_sm, lens):
        time = lambda splits: simulated_time(lens, splits, num_sms, blocks_per_sm)
        assert time(self.plan(lens, num_sms, blocks_per_sm)) <= 1.12 * min(map(time, (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)))

    def test_full_turns_are_not_split(self, num_sms, blocks_per_sm):
        one = {"page_size": 16, "num_q_heads": 4, "num_kv_heads": 1, "num_sms": num_sms, "blocks_per_sm": blocks_per_sm}
        for turns in (1, 2, 5):
            assert plan_splits([8192] * (turns * num_sms * blocks_per_sm), **one) == 1
        # Half a device would stand still.
        assert plan_splits([8192] * (num_sms * blocks_per_sm // 2), **one) > 1

    def test_one_turn_of_one_request(self, num_sms, blocks_per_sm):
        blocks = 8 * self.plan([200_000], num_sms, blocks_per_sm)
        # Where an SM has several, which don't end together, a second turn of blocks half as long may pay.
        assert 0.8 * num_sms * blocks_per_sm <= blocks <= num_sms * blocks_per_sm * min(2, blocks_per_sm)

    def test_short_contexts_stay_whole(self, num_sms, blocks_per_sm):
        for tokens in (0, 1, 16):
            assert self.plan([tokens] * 4, num_sms, blocks_per_sm) == 1
        assert self.plan([], num_sms, blocks_per_sm) == 1

    def test_empty_requests_do_not_count(self, num_sms, blocks_per_sm):
        assert self.plan([0, 5000, 0, 0], num_sms, blocks_per_sm) == self.plan([5000], num_sms, blocks_per_sm) > 1

    def test_no_split_is_empty_for_the_longest(self, num_sms, blocks_per_sm):
        for lens in ([100], [1000, 10], [5000], [33_333] * 2):
            ranges = split_ranges(max(lens), 16, self.plan(lens, num_sms, blocks_per_sm))
            assert all(begin < end for begin, end in ranges)


def test_the_uniform_schedule_knows_its_kernel():
    def cut(**sizes):
        args = paged((1024,), num_q_heads=32, num_kv_heads=8, head_dim=128, extra_entries=0, **sizes)
        problem = check_problem(**args, sm_scale=None, layout="NHD", lse_base="e", check_values=False, not_yet=NOT_YET)
        return choose_cut(problem, "uniform", None, None, "float32").num_splits, partial_blocks(problem)

    # 9 blocks of 24 KB in the 228 KB of an SM
    splits, blocks = cut(dtype="float32")
    assert blocks == {"blocks_per_sm": 9, "heads_per_block": 16}
    assert splits == plan_splits([1024], page_size=16, num_sms=132, blocks_per_sm=9, **HEADS)
    splits, blocks = cut(dtype="float16")
    assert blocks == {"blocks_per_sm": 1, "heads_per_block": 4}
    assert splits == 8


def test_chunks_of_query_heads_are_blocks():
    sizes = {"page_size": 16, "num_q_heads": 128, "num_kv_heads": 8, "num_sms": 132, "blocks_per_sm": 1}
    assert plan_splits([8192] * 8, heads_per_block=8, **sizes) == plan_splits([8192] * 16, heads_per_block=16, **sizes) == 1
    assert plan_splits([8192] * 8, heads_per_block=16, **sizes) == 2


def test_order_and_kind_of_the_lengths_do_not_matter():
    lens = [900, 0, 30_000, 17]
    plans = {
        plan_splits(kind, page_size=16, num_sms=132, **HEADS)
        for kind in (lens, lens[::-1], tuple(lens), np.array(lens), np.array(lens, np.int32), np.array(lens, np.uint64))
    }
    assert len(plans) == 1


def test_the_planner_needs_no_cupy_and_no_compiler():
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "from cupy_kernels import plan_splits, split_ranges\n"
        "print(split_ranges(37, 16, 4), plan_splits([32768], page_size=16, num_q_heads=32, num_kv_heads=8, num_sms=170))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"PATH": ""})
    assert done.stdout == "[(0, 1), (1, 2), (2, 3), (3, 3)] 64\n", done.stderr
