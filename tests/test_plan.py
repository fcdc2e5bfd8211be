"""split_ranges and plan_splits: host integers in and out, no array, no device."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import reference
from cupy_kernels import plan_splits, split_ranges

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
    st.lists(st.integers(0, 200_000), max_size=80), st.sampled_from((1, 16, 64)), st.integers(1, 16), st.sampled_from((1, 4, 40))
)
def test_no_more_splits_than_pages(num_sms, lens, page_size, num_kv_heads, group):
    splits = plan_splits(lens, page_size=page_size, num_q_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, num_sms=num_sms)
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
