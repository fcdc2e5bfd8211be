"""The worked numbers of the project, on the kernels; test_reference.py has them on the reference."""

import numpy as np
import pytest
from helpers import DTYPES, U32, assert_empty, assert_same_bits, decode, move, paged, to_numpy

import reference
from cupy_kernels import merge_state, merge_states, plan_splits, split_decode, split_ranges
from cupy_kernels.merge import ALGORITHMS

RANGES = {
    1000: [(0, 16), (16, 32), (32, 48), (48, 63)],
    37: [(0, 1), (1, 2), (2, 3), (3, 3)],
    100: [(0, 2), (2, 4), (4, 6), (6, 7)],
}
# scores [1, 2, 3, 0], values [10, 20, 30, 40]
WEIGHTS = np.exp(np.array([1.0, 2, 3, 0]))
VALUES = np.array([10.0, 20, 30, 40])
MERGED = WEIGHTS @ VALUES / WEIGHTS.sum()


def merge(xp, o, lse, function=merge_states, **options):
    return tuple(map(to_numpy, function(*(move(xp, np.array(x, np.float32)) for x in (o, lse)), **options)))


def by_hand(dtype="float32"):
    """The four keys on pages of two, head_dim 8: q = e_0 and k = score e_0, v = value in every column."""
    args = paged((4,), num_q_heads=1, num_kv_heads=1, head_dim=8, page_size=2, dtype=dtype)
    args["q"][:] = np.eye(1, 8)
    pages = args["page_table"][0, :2]
    args["k_cache"][pages] = (np.array([1, 2, 3, 0]).reshape(2, 2, 1, 1) * np.eye(1, 8)).astype(DTYPES[dtype])
    args["v_cache"][pages] = VALUES.reshape(2, 2, 1, 1)
    return args


@pytest.mark.parametrize("context_len", RANGES)
def test_1_page_ranges(xp, context_len):
    assert split_ranges(context_len, 16, 4) == RANGES[context_len]
    # with all weights alike, a split's headcount is exp(lse)
    args = paged((context_len,), num_q_heads=1, num_kv_heads=1, head_dim=8)
    args["q"][:] = 0
    _, lse = decode(xp, args, split_decode, num_splits=4)
    tokens = {1000: [256, 256, 256, 232], 37: [16, 16, 5, 0], 100: [32, 32, 32, 4]}[context_len]
    # exp turns the absolute error of lse, 2 roundings of a number below 6, into a relative one
    assert np.all(np.abs(np.exp(lse[0, 0].astype(np.float64)) - tokens) <= np.array(tokens) * 2 * 6 * U32)


def test_1_last_pages():
    # 1000: 15 pages in the last split, 8 tokens on the last page; 37: 5 tokens on the third; 100: 4 tokens alone
    assert RANGES[1000][3][1] - RANGES[1000][3][0] == 15
    assert 1000 - 62 * 16 == 8
    assert 37 - 2 * 16 == 5
    assert 100 - 6 * 16 == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_2_merge_by_hand(xp, dtype):
    assert abs(MERGED - 26.208871) < 5e-7
    args = by_hand(dtype)
    o, lse = (x[0, 0].astype(np.float64) for x in decode(xp, args, split_decode, num_splits=2, sm_scale=1.0))
    parts = [slice(0, 2), slice(2, 4)]
    want_o = np.array([WEIGHTS[p] @ VALUES[p] / WEIGHTS[p].sum() for p in parts])
    want_lse = np.array([np.log(WEIGHTS[p].sum()) for p in parts])
    np.testing.assert_array_equal(np.round(want_o, 2), [17.31, 30.47])
    np.testing.assert_array_equal(np.round(want_lse, 3), [2.313, 3.049])
    # Small integers are exact. A weight: the score's change of base 2 roundings of up to 3, ex2 5; it moves o by the spread
    # of the values, 10, times a weight below 1; sum and quotient: 4 roundings of o.
    assert np.all(np.abs(o - want_o[:, None]) <= U32 * (10 * (2 * 3 + 5) + 4 * want_o[:, None]))
    assert np.all(np.abs(lse - want_lse) <= U32 * (2 * 3 + 5 + 4 * want_lse))
    # l of the merge and its weights, off the kernel's own lse
    np.testing.assert_array_equal(np.round(np.exp(lse - lse.max()), 3), [0.479, 1])
    for num_splits in (1, 2, 4, 7):
        out, whole_lse = decode(xp, args, num_splits=num_splits, sm_scale=1.0, out_dtype="float32")
        # the same, once more for the merge
        assert np.all(np.abs(out - MERGED) <= U32 * (30 * 2 * (2 * 3 + 5) + 8 * MERGED))
        assert np.all(np.round(out, 2) == np.float32(26.21))
        assert np.all(np.abs(whole_lse - np.log(WEIGHTS.sum())) <= U32 * (2 * (2 * 3 + 5) + 8 * 3.5))
    assert round(want_o.mean(), 2) == 23.89
    assert np.all(np.abs(out - want_o.mean()) > 2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_3_weights_matter_only_if_the_o_differ(xp, algorithm):
    o, lse = merge(xp, [[1, 1], [1, 1]], [0, 10], algorithm=algorithm)
    # (w + 1) / (w + 1)
    assert_same_bits(o, np.ones(2, np.float32))
    o, lse = merge(xp, [[1, 0], [0, 1]], [0, 10], algorithm=algorithm)
    small = np.exp(-10) / (1 + np.exp(-10))
    # each is a quotient: weight 10 roundings from the change of base and 5 of ex2, twice online, sum and quotient 1 each
    assert abs(o[0] - small) <= small * 32 * U32
    assert abs(o[1] - (1 - small)) <= 2 * U32
    assert abs(lse - (10 + np.log1p(np.exp(-10)))) <= 3 * 10 * U32


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_4_empty_splits(xp, algorithm):
    args = paged((37, 1000), num_q_heads=2, num_kv_heads=1)
    o, lse = decode(xp, args, split_decode, num_splits=4)
    assert_empty((o[0, :, 3], lse[0, :, 3]))
    out, out_lse = merge(xp, o, lse, algorithm=algorithm)
    assert np.all(np.isfinite(out))
    assert np.all(np.isfinite(out_lse))
    # states that only pad the axis to a convenient width change no bit, wherever they stand
    for order in ([0, 1, 2, 3, 4, 4], [4, 0, 1, 4, 2, 3]):
        padded_o = np.concatenate([o, np.full_like(o[:, :, :1], np.nan)], 2)[:, :, order]
        padded_lse = np.concatenate([lse, np.full_like(lse[:, :, :1], -np.inf)], 2)[:, :, order]
        assert_same_bits(merge(xp, padded_o, padded_lse, algorithm=algorithm), (out, out_lse))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("offset", [-1e5, -300.0, 89.0, 300.0, 1e5])
def test_5_an_lse_of_a_few_hundred(xp, algorithm, offset):
    # exp overflows float32 above 88.7; the maximum is subtracted first, and whole numbers up to 2^24 are exact
    o = [[1.0, 0], [0, 1]]
    plain, shifted = merge(xp, o, [0.0, 3], algorithm=algorithm), merge(xp, o, [offset, offset + 3], algorithm=algorithm)
    assert_same_bits(shifted[0], plain[0])
    assert abs(shifted[1] - (offset + np.log1p(np.exp(3)))) <= U32 * (abs(offset) + 2 * 3)


def test_6_partials_are_float32_and_small(xp):
    args = paged((1,), num_q_heads=32, num_kv_heads=8, head_dim=128)
    o, _ = decode(xp, args, split_decode, num_splits=64)
    assert o.dtype == np.float32
    assert o.nbytes == 1 << 20
    # K and V at 32768 tokens in 16 bits
    assert 2 * 32768 * 8 * 128 * 2 == 128 << 20


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_6_a_16_bit_partial_is_rounded_once_more(xp, dtype):
    args = paged((100,))
    o, lse = decode(xp, args, split_decode, num_splits=4)
    rounded, same_lse = decode(xp, args, split_decode, num_splits=4, partial_dtype=dtype)
    assert_same_bits((rounded, same_lse), (o.astype(DTYPES[dtype]), lse))
    whole = decode(xp, args, num_splits=4, partial_dtype=dtype, out_dtype="float32")
    assert_same_bits(whole, merge(xp, rounded, lse))


@pytest.mark.parametrize(("batch_size", "context_len", "splits"), [(1, 32768, 64), (8, 4096, 16), (64, 1024, 1)])
def test_7_plans_for_170_sms(batch_size, context_len, splits):
    sizes = {"page_size": 16, "num_q_heads": 32, "num_kv_heads": 8, "num_sms": 170}
    assert plan_splits([context_len] * batch_size, **sizes) == splits


def test_8_two_bases(xp):
    o, lse_e = np.array([[[1.0, 0], [0, 1]]]), np.array([[2.0, 5.0]])
    natural = merge(xp, o, lse_e)
    base_2 = merge(xp, o, lse_e / np.log(2), lse_base="2")
    # an lse rounded in either base is off by 5 or 7.2 roundings, an error of its weight, which is at most 1/4 (x (1 - x))
    assert np.all(np.abs(natural[0] - base_2[0]) <= U32 * (5 + 7.2 + 30))
    assert abs(natural[1] - base_2[1] * np.log(2)) <= U32 * 30
    # one of each is wrong by tens of per cent here, and by nothing when both are alike
    want = np.exp(2) / (np.exp(2) + np.exp(5))
    mixed = merge(xp, o, np.array([[2.0 / np.log(2), 5.0]]))[0][0, 0]
    assert mixed / want - 1 > 0.3
    alike = merge(xp, o, np.array([[0.0, 0.0]]))
    assert_same_bits(merge(xp, o, np.array([[0.0, 0.0]]), lse_base="2")[0], alike[0])


def test_9_two_algorithms_one_result(xp):
    rng = np.random.default_rng(9)
    o, lse = rng.standard_normal((40, 64, 8)), np.sort(10 * rng.standard_normal((40, 64)), -1)
    first, online = (merge(xp, o, lse, algorithm=algorithm) for algorithm in ALGORITHMS)
    # ascending lse: the online form rescales at every state, by a factor off by 6 u, in numerator and denominator
    assert np.abs(first[0] - online[0]).max() <= 2 * 64 * 6 * U32 * np.abs(o).max()
    assert np.abs(first[1] - online[1]).max() <= 64 * 6 * U32
    assert np.any(first[0] != online[0])
    # the maximum first in line leaves nothing to rescale, among as many states as one warp takes
    first, online = (merge(xp, o[:, :-9:-1], lse[:, :-9:-1], algorithm=algorithm) for algorithm in ALGORITHMS)
    assert_same_bits(first, online)


def test_10_a_cut_by_tokens_counts_no_page_twice_here(xp):
    # 37 tokens in 4 splits of tokens would cut pages at 9, 18 and 27; here every token is in one split: headcounts add up
    args = paged((37,), num_q_heads=1, num_kv_heads=1, head_dim=8)
    args["q"][:] = 0
    for num_splits in range(1, 9):
        _, lse = decode(xp, args, split_decode, num_splits=num_splits)
        assert abs(np.exp(lse.astype(np.float64)).sum() - 37) <= 37 * 2 * 4 * U32


def test_11_a_mean_of_means_needs_the_class_sizes(xp):
    marks, classes = np.array([50.0, 70, 90, 40, 60]), [slice(0, 3), slice(3, 5)]
    means, sizes = [[marks[c].mean()] for c in classes], np.array([3.0, 2])
    o, lse = map(to_numpy, merge_state(*(move(xp, np.array(x, np.float32)) for x in (means[0], np.log(3), means[1], np.log(2)))))
    # 62, not 60; a weight is off by 2 roundings of log 3 and 5 of ex2, o by that times the spread of 20
    assert abs(o.item() - 62) <= U32 * (20 * (2 * 1.1 + 5) + 4 * 62)
    assert abs(np.exp(np.float64(lse)) - sizes.sum()) <= 5 * 8 * U32
    want, _ = reference.merge(np.array(means), np.log(sizes))
    assert abs(want.item() - 62) <= 62 * 8 * U32
