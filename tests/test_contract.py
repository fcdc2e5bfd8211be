"""The contract, rules 1 to 7: empty states, NaN, what may not be read, the forms of o and lse, the cuts."""

import numpy as np
import pytest
from helpers import (
    DTYPES,
    KERNELS,
    assert_empty,
    assert_same_bits,
    check,
    decode,
    every_kernel,
    every_schedule,
    move,
    on,
    paged,
    slot_of,
    to_numpy,
)

from cupy_kernels import merge_state, merge_states, split_decode, split_ranges
from cupy_kernels.decode import takes_tensor_cores
from cupy_kernels.merge import ALGORITHMS
from cupy_kernels.problem import NOT_YET, check_problem


@pytest.mark.parametrize(("head_dim", "tensor_cores"), [(KERNELS[0].values[0], False), (KERNELS[1].values[0], True)])
def test_head_dim_chooses_the_kernels(xp, head_dim, tensor_cores):
    how = {"sm_scale": None, "layout": "NHD", "lse_base": "e", "check_values": False, "not_yet": NOT_YET}
    problem = check_problem(**on(xp, paged((37,), head_dim=head_dim)), **how)
    assert takes_tensor_cores(problem) == tensor_cores


class TestRule1Empty:
    """No visible key: o = 0, lse = -inf, at every level."""

    @every_schedule
    @pytest.mark.parametrize("lens", [(0,), (0, 9), (9, 0), (1, 3), (0, 37, 1000), (0, 0, 0)])
    @every_kernel
    def test_requests(self, xp, head_dim, schedule, lens):
        out, lse = check(xp, paged(lens, page_size=4 if max(lens) < 10 else 16, head_dim=head_dim), schedule)
        for b, n in enumerate(lens):
            if n == 0:
                assert_empty((out[b], lse[b]))

    @every_schedule
    @every_kernel
    def test_no_requests_and_a_table_of_no_width(self, xp, head_dim, schedule):
        for lens in ((), (0, 0)):
            args = paged(lens, extra_entries=0, head_dim=head_dim)
            assert args["page_table"].shape == (len(lens), 0)
            out, lse = decode(xp, args, **schedule)
            assert out.shape == (len(lens), 4, head_dim)
            assert lse.shape == (len(lens), 4)
            assert_empty((out, lse))

    @every_schedule
    @every_kernel
    def test_no_pages_in_the_pool(self, xp, head_dim, schedule):
        args = paged((0, 0), head_dim=head_dim)
        args |= {name: args[name][:0] for name in ("k_cache", "v_cache")}
        assert_empty(decode(xp, args, **schedule))

    @every_kernel
    def test_splits(self, xp, head_dim):
        o, lse = decode(xp, paged((37, 0), head_dim=head_dim), split_decode, num_splits=4)
        assert_empty((o[0, :, 3], lse[0, :, 3]))
        assert np.all(np.isfinite(lse[0, :, :3]))
        assert_empty((o[1], lse[1]))

    @every_schedule
    @pytest.mark.parametrize("dtype", DTYPES)
    @every_kernel
    def test_all_scores_minus_infinity(self, xp, head_dim, schedule, dtype):
        args = paged((37, 5), dtype=dtype, head_dim=head_dim)
        args["q"] = np.abs(args["q"])
        for token in range(37):
            args["k_cache"][slot_of(args, 0, token)] = -np.inf
        out, lse = check(xp, args, schedule)
        assert_empty((out[0], lse[0]))

    @every_schedule
    def test_scores_below_any_finite_sentinel(self, xp, schedule):
        # all -2^19: a finite stand-in for -inf of, say, -5e4 would win against them; equal values make the bound of o a few ulp
        args = paged((37, 0), dtype="float32", num_q_heads=2)
        args["q"][:], args["k_cache"][:], args["v_cache"][:] = 0, 0, 1.5
        args["q"][..., 0], args["k_cache"][..., 0] = 2.0**9, -(2.0**10)
        out, lse = check(xp, args, schedule, sm_scale=1.0)
        assert np.all(np.abs(out[0] - 1.5) < 1e-4)
        assert np.all(lse[0] < -5e5)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_merges(self, xp, algorithm):
        o, lse = np.full((3, 4, 8), np.nan, np.float32), np.full((3, 4), -np.inf, np.float32)
        assert_empty(merge_states(move(xp, o), move(xp, lse), algorithm=algorithm))
        assert_empty(merge_state(*(move(xp, x[:, 0]) for x in (o, lse, o, lse))))


class TestRule2Selected:
    """NaN or garbage in the o of an empty state cannot leak, not even into a bit."""

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 6e4])
    def test_merge(self, xp, algorithm, dtype, garbage):
        rng = np.random.default_rng(1)
        o, lse = rng.standard_normal((6, 5, 8)).astype(DTYPES[dtype]), rng.standard_normal((6, 5)).astype(np.float32)
        lse[rng.random(lse.shape) < 0.5] = -np.inf
        o[lse == -np.inf] = 0
        want = merge_states(move(xp, o), move(xp, lse), algorithm=algorithm)
        o[lse == -np.inf] = garbage
        got = merge_states(move(xp, o), move(xp, lse), algorithm=algorithm)
        assert_same_bits(tuple(map(to_numpy, got)), tuple(map(to_numpy, want)))


class TestRule3RealNaN:
    """A NaN that is visible reaches exactly the outputs that it reaches in the reference."""

    @every_schedule
    @pytest.mark.parametrize("token", [0, 20, 36])
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @every_kernel
    def test_in_v(self, xp, head_dim, schedule, token, bad):
        args = paged((37, 20), head_dim=head_dim)
        args["v_cache"][(*slot_of(args, 0, token), 1, 5)] = bad
        out, lse = check(xp, args, schedule)
        assert np.array_equal(np.argwhere(~np.isfinite(out)), [[0, 2, 5], [0, 3, 5]])
        assert np.all(np.isfinite(lse))

    @every_schedule
    @pytest.mark.parametrize("token", [0, 20, 36])
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @every_kernel
    def test_in_k(self, xp, head_dim, schedule, token, bad):
        args = paged((37, 20), head_dim=head_dim)
        args["q"] = np.abs(args["q"])
        args["k_cache"][(*slot_of(args, 0, token), 1, 5)] = bad
        out, lse = check(xp, args, schedule)
        assert np.array_equal(np.argwhere(np.isnan(lse)), [[0, 2], [0, 3]])
        assert np.array_equal(np.isnan(out), np.repeat(np.isnan(lse)[..., None], head_dim, -1))

    @every_schedule
    @pytest.mark.parametrize("dtype", DTYPES)
    @every_kernel
    def test_in_q(self, xp, head_dim, schedule, dtype):
        args = paged((37, 20, 0), dtype=dtype, head_dim=head_dim)
        args["q"][:, 1, 3] = np.nan
        out, lse = check(xp, args, schedule)
        # a request of no keys never looks at its q
        assert np.array_equal(np.argwhere(np.isnan(lse)), [[0, 1], [1, 1]])
        assert np.array_equal(np.isnan(out), np.repeat(np.isnan(lse)[..., None], head_dim, -1))

    @every_schedule
    @every_kernel
    def test_every_key_nan(self, xp, head_dim, schedule):
        # a maximum that drops NaN finds no key here: the head must not look empty
        args = paged((37, 0), head_dim=head_dim)
        for token in range(37):
            args["k_cache"][slot_of(args, 0, token)] = np.nan
        out, lse = check(xp, args, schedule)
        assert np.all(np.isnan(out[0]))
        assert np.all(np.isnan(lse[0]))
        assert_empty((out[1], lse[1]))

    @every_schedule
    @every_kernel
    def test_score_of_minus_infinity_has_weight_zero(self, xp, head_dim, schedule):
        args = paged((37, 20), head_dim=head_dim)
        args["q"] = np.abs(args["q"])
        for token in (0, 1, 18, *range(32, 37)):
            args["k_cache"][slot_of(args, 0, token)] = -np.inf
        out, lse = check(xp, args, schedule)
        assert np.all(np.isfinite(out))
        assert np.all(np.isfinite(lse))

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("position", [0, 1, 2])
    @pytest.mark.parametrize("others", [0.0, -np.inf])
    def test_in_the_lse_of_a_state(self, xp, algorithm, position, others):
        o, lse = np.ones((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
        lse[0] = others
        lse[0, position] = np.nan
        got, got_lse = map(to_numpy, merge_states(move(xp, o), move(xp, lse), algorithm=algorithm))
        assert np.array_equal(np.isnan(got), [[True] * 4, [False] * 4])
        assert np.array_equal(np.isnan(got_lse), [True, False])


class TestRule4Unreadable:
    """What no request owns never influences a bit, whatever it holds."""

    @every_schedule
    @pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    @every_kernel
    def test_poison(self, xp, head_dim, schedule, poison, dtype):
        for lens, page_size, layout in (((13, 1, 0), 4, "NHD"), ((32, 64, 96, 48), 128, "HND")):
            options = {"page_size": page_size, "layout": layout, "dtype": dtype, "head_dim": head_dim}
            want = decode(xp, paged(lens, poison=0, **options), layout=layout, **schedule)
            got = decode(xp, paged(lens, poison=poison, **options), layout=layout, **schedule)
            assert_same_bits(got, want)
            assert np.all(np.isfinite(got[0]))

    @every_schedule
    @every_kernel
    def test_page_ids_past_the_last_page(self, xp, head_dim, schedule):
        args = paged((37, 0, 100), extra_entries=0, head_dim=head_dim)
        want = decode(xp, args, **schedule)
        for b, n in enumerate((37, 0, 100)):
            args["page_table"][b, -(-n // 16) :] = np.iinfo(np.int32).min
        assert_same_bits(decode(xp, args, **schedule), want)


class TestRule5Lse:
    """float32, natural at every boundary, base 2 on request, shaped as o without its last axis."""

    @every_schedule
    @every_kernel
    def test_bases(self, xp, head_dim, schedule):
        args = paged((37, 100, 0), head_dim=head_dim)
        out, lse = decode(xp, args, **schedule)
        out_2, lse_2 = decode(xp, args, **schedule, lse_base="2")
        # Partial lse in another base are other float32 numbers: an output next to a tie may round the other way.
        assert np.all(np.abs(out_2 - out) <= np.spacing(np.abs(out)))
        for x in (lse, lse_2):
            assert x.dtype == np.float32
            assert x.shape == out.shape[:-1]
        # each is off by 4 roundings of what it is the sum of, m and log l, which are below 16 here
        seen = np.isfinite(lse)
        difference = lse_2[seen].astype(np.float64) * np.log(2) - lse[seen]
        assert np.abs(difference).max() <= 8 * 2.0**-24 * 16
        assert np.all(lse_2[~seen] == -np.inf)


class TestRule6Partials:
    """A partial o is float32 unless asked otherwise, its lse always."""

    @every_kernel
    def test_dtypes(self, xp, head_dim):
        args = paged((37, 0), head_dim=head_dim)
        assert decode(xp, args, split_decode, num_splits=2)[0].dtype == np.float32
        for name, dtype in DTYPES.items():
            o, lse = decode(xp, args, split_decode, num_splits=2, partial_dtype=name)
            assert o.dtype == dtype
            assert lse.dtype == np.float32


class TestRule7Cuts:
    """Half-open page intervals, from one function."""

    @pytest.mark.parametrize(("context_len", "num_splits"), [(1000, 4), (37, 4), (100, 4), (64, 3), (65, 70), (1, 2), (0, 3)])
    def test_each_split_holds_the_pages_of_split_ranges(self, xp, context_len, num_splits):
        # q = 0 weighs all tokens alike; v[token] is the unit vector of its page: o counts the split's tokens by page
        page_size, head_dim = 16, 64
        args = paged((context_len,), head_dim=head_dim, num_q_heads=1, num_kv_heads=1, poison=0, dtype="float32")
        args["q"][:] = 0
        args["v_cache"][:] = 0
        pages = -(-context_len // page_size)
        for page in range(pages):
            args["v_cache"][args["page_table"][0, page], :, 0, page] = 1
        o, lse = decode(xp, args, split_decode, num_splits=num_splits)
        tokens = np.minimum(page_size, context_len - page_size * np.arange(head_dim)).clip(0)
        for s, (begin, end) in enumerate(split_ranges(context_len, page_size, num_splits)):
            mine = np.where((np.arange(head_dim) >= begin) & (np.arange(head_dim) < end), tokens, 0).astype(np.float32)
            # counts are exact, their quotient rounded once
            assert_same_bits(o[0, 0, s], mine / np.float32(max(1, mine.sum())))
            # log2 of a count: 1 ulp, and the change of base
            want = np.log(mine.sum()) if mine.any() else -np.inf
            assert lse[0, 0, s] == want or abs(lse[0, 0, s] - want) <= 4 * 2.0**-24 * abs(want)
