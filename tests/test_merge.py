"""merge_states, merge_state and merge_state_in_place: shapes, strides, masks, aliases, foreign states, the algebra."""

import numpy as np
import pytest
from helpers import (
    DTYPES,
    U32,
    Guarded,
    assert_empty,
    assert_same_bits,
    assert_within,
    bits,
    merge_bound,
    move,
    stored,
    to_numpy,
)

import reference
from cupy_kernels import merge_state, merge_state_in_place, merge_states
from cupy_kernels.merge import ALGORITHMS

F64 = reference.Precision.uniform("float64")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
LEADS = [(), (3,), (2, 3), (2, 3, 4), (0,), (2, 0)]


def states(lead=(3, 5), num_states=2, head_dim=8, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    o = rng.standard_normal((*lead, num_states, head_dim)).astype(DTYPES[dtype])
    return o, (3 * rng.standard_normal((*lead, num_states))).astype(np.float32)


def merged(xp, function, *arrays, **options):
    return tuple(map(to_numpy, function(*(move(xp, x) for x in arrays), **options)))


def in_place(xp, o, lse, *others, **options):
    o, lse = move(xp, o.copy()), move(xp, lse.copy())
    assert merge_state_in_place(o, lse, *(move(xp, x) for x in others), **options) is None
    return to_numpy(o), to_numpy(lse)


@pytest.mark.parametrize("lead", LEADS)
@every_dtype
def test_all_three_give_the_same_bits(xp, lead, dtype):
    o, lse = states(lead, dtype=dtype)
    want = merged(xp, merge_states, o, lse)
    assert want[0].shape == (*lead, 8)
    assert want[1].shape == lead
    pair = (o[..., 0, :], lse[..., 0], o[..., 1, :], lse[..., 1])
    assert_same_bits(merged(xp, merge_state, *pair), want)
    assert_same_bits(in_place(xp, *pair), want)
    want_o, want_lse = reference.merge(o, lse, precision=F64)
    if want_lse.size:
        e_o, e_lse = merge_bound(o, lse, want_o, want_lse, dtype)
        assert_within(want[0], want_o, e_o)
        assert_within(want[1], want_lse, e_lse)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_bases(xp, algorithm, lse_base):
    o, lse = states((4,), 7)
    unit = np.log(2) if lse_base == "2" else 1.0
    want, want_lse = reference.merge(o, lse.astype(np.float64) * unit, precision=F64)
    # the lse it sees is exact in its own base; the bound is in natural units
    e_o, e_lse = merge_bound(o, lse * unit, want, want_lse)
    got, got_lse = merged(xp, merge_states, o, lse, lse_base=lse_base, algorithm=algorithm)
    assert_within(got, want, e_o)
    assert_within(got_lse * np.float64(unit), want_lse, e_lse)


def test_out_dtype(xp):
    o, lse = states()
    wide = merged(xp, merge_states, o, lse)
    for name, dtype in DTYPES.items():
        for given in (name, dtype, np.dtype(dtype)):
            got = merged(xp, merge_states, o, lse, out_dtype=given)
            # one rounding of the same float32
            assert_same_bits(got, (wide[0].astype(dtype), wide[1]))
    assert merged(xp, merge_states, o.astype(np.float16), lse)[0].dtype == np.float16


@pytest.mark.parametrize("shape", ["slices", "swapped", "transposed", "broadcast", "backwards"])
def test_strides(xp, shape):
    o, lse = states((4, 6), 3, head_dim=5)
    wide = np.full((8, 9, 7, 11), np.nan, np.float32)
    wide[1:5, 2:8, 1:7:2, 4:9] = o
    views = {
        "slices": (wide[1:5, 2:8, 1:7:2, 4:9], np.repeat(lse, 2, -1)[..., ::2]),
        "swapped": (
            np.ascontiguousarray(o.swapaxes(1, 2)).swapaxes(1, 2),
            np.ascontiguousarray(lse.swapaxes(1, 2)).swapaxes(1, 2),
        ),
        "transposed": (np.ascontiguousarray(o.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3), lse.T.copy().T),
        "broadcast": (np.broadcast_to(o[:, :1], o.shape), np.broadcast_to(lse[:, :1], lse.shape)),
        "backwards": (o[::-1].copy()[::-1], lse[..., ::-1].copy()[..., ::-1]),
    }
    view, view_lse = views[shape]
    want = merged(xp, merge_states, np.ascontiguousarray(view), np.ascontiguousarray(view_lse))
    assert_same_bits(merged(xp, merge_states, view, view_lse), want)
    # three leading axes that no two strides describe
    o, lse = view[:, ::2].transpose(1, 0, 2, 3)[None], view_lse[:, ::2].transpose(1, 0, 2)[None]
    want = merged(xp, merge_states, np.ascontiguousarray(o), np.ascontiguousarray(lse))
    assert_same_bits(merged(xp, merge_states, o, lse), want)


class TestManyStates:
    """Rows of more states than one warp takes, and of more or fewer columns than it has lanes for."""

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("num_states", [1, 7, 8, 9, 17, 40, 64, 65, 200])
    @pytest.mark.parametrize("head_dim", [1, 66, 128, 260])
    def test_against_the_reference(self, xp, algorithm, num_states, head_dim):
        o, lse = states((3, 3), num_states, head_dim, seed=num_states)
        # Nothing in the first batch of one row, and in all but the last state of another.
        lse[0, 0, :8] = lse[1, 1, :-1] = -np.inf
        want, want_lse = reference.merge(o, lse, precision=F64)
        e_o, e_lse = merge_bound(o, lse, want, want_lse)
        o[lse == -np.inf] = np.nan
        got, got_lse = merged(xp, merge_states, o, lse, algorithm=algorithm)
        assert_within(got, want, e_o)
        assert_within(got_lse, want_lse, e_lse)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("num_states", [3, 9, 30, 70])
    def test_empty_states_behind_change_no_bit(self, xp, algorithm, num_states):
        o, lse = states((5,), num_states, 32)
        want = merged(xp, merge_states, o, lse, algorithm=algorithm)
        for behind in (1, 10, 100):
            o_more = np.concatenate([o, np.full((5, behind, 32), np.nan, np.float32)], 1)
            lse_more = np.concatenate([lse, np.full((5, behind), -np.inf, np.float32)], 1)
            assert_same_bits(merged(xp, merge_states, o_more, lse_more, algorithm=algorithm), want)

    @pytest.mark.parametrize("num_states", [2, 12, 40, 100])
    def test_a_row_does_not_depend_on_others(self, xp, num_states):
        o, lse = states((11,), num_states, 64)
        want = merged(xp, merge_states, o, lse)
        for rows in (slice(0, 1), slice(3, 10), slice(10, 11)):
            assert_same_bits(merged(xp, merge_states, o[rows], lse[rows]), tuple(x[rows] for x in want))

    @pytest.mark.parametrize("position", [0, 8, 39])
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_nan_anywhere(self, xp, algorithm, position):
        o, lse = states((3,), 40)
        o[0, position, 5] = np.nan
        lse[1, position] = np.nan
        got, got_lse = merged(xp, merge_states, o, lse, algorithm=algorithm)
        assert np.argwhere(np.isnan(got)).tolist() == [[0, 5], *([1, d] for d in range(8))]
        assert np.isnan(got_lse).tolist() == [False, True, False]


@every_dtype
def test_unaligned_rows_give_the_same_bits(xp, dtype):
    o, lse = states((5,), 3, 64, dtype)
    memory = np.zeros((5, 3, 65), o.dtype)
    memory[..., 1:] = o
    assert_same_bits(merged(xp, merge_states, memory[..., 1:], lse), merged(xp, merge_states, o, lse))
    pair = o[:, 0].copy(), lse[:, 0].copy(), o[:, 1].copy(), lse[:, 1].copy()
    want = merged(xp, merge_state, *pair)
    assert_same_bits(merged(xp, merge_state, memory[:, 0, 1:], *pair[1:]), want)
    assert_same_bits(in_place(xp, *pair[:2], memory[:, 1, 1:], pair[3]), want)


class TestInPlace:
    @pytest.mark.parametrize("lead", [(7,), (3, 5), (2, 3, 4)])
    @every_dtype
    def test_mask_keeps_rows(self, xp, lead, dtype):
        o, lse = states(lead, dtype=dtype)
        pair = (o[..., 0, :].copy(), lse[..., 0].copy(), o[..., 1, :], lse[..., 1])
        everywhere = in_place(xp, *pair)
        mask = np.random.default_rng(2).random(lead) < 0.5
        got = in_place(xp, *pair, mask=move(xp, mask))
        for new, old, all_new in zip(got, pair, everywhere, strict=False):
            chosen = mask if new.ndim == len(lead) else mask[..., None]
            np.testing.assert_array_equal(bits(new), np.where(chosen, bits(all_new), bits(old)))
        assert_same_bits(in_place(xp, *pair, mask=move(xp, np.zeros(lead, bool))), pair[:2])
        strided = np.repeat(mask, 2, -1)[..., ::2]
        assert_same_bits(in_place(xp, *pair, mask=move(xp, strided)), got)

    def test_outputs_as_slices_of_three_axes(self, xp):
        # leading axes that two strides do not describe: the result has to come back through a copy
        o, lse = states((2, 3, 4))
        pair = (o[..., 0, :], lse[..., 0], o[..., 1, :], lse[..., 1])
        want = in_place(xp, *pair)
        out, out_lse = Guarded(xp, pair[0].shape), Guarded(xp, pair[1].shape)
        out.view[...], out_lse.view[...] = move(xp, pair[0].copy()), move(xp, pair[1].copy())
        merge_state_in_place(out.view, out_lse.view, *(move(xp, x) for x in pair[2:]))
        for guarded, wanted in ((out, want[0]), (out_lse, want[1])):
            np.testing.assert_array_equal(to_numpy(guarded.view), wanted)
            guarded.assert_outside_untouched()

    def test_with_itself(self, xp):
        o, lse = states((6,), 1)
        o, lse = move(xp, o[:, 0].copy()), move(xp, lse[:, 0].copy())
        before = to_numpy(o).copy(), to_numpy(lse).copy()
        merge_state_in_place(o, lse, o, lse)
        # (o + o) / 2 is exact; log 2 is added with a rounding of the sum and one of its own
        assert_same_bits(to_numpy(o), before[0])
        want = before[1].astype(np.float64) + np.log(2)
        assert np.all(np.abs(to_numpy(lse) - want) <= U32 * (np.abs(want) + 2))


class TestForeignStates:
    """What other libraries hand over. Nothing is guessed."""

    @pytest.mark.parametrize("position", [0, 1])
    @pytest.mark.parametrize("foreign", [np.inf, np.nan])
    def test_an_lse_that_means_empty_elsewhere_is_nan_here(self, xp, position, foreign):
        o, lse = states((4,))
        lse[1, position] = foreign
        for got in (
            merged(xp, merge_states, o, lse),
            merged(xp, merge_states, o, lse, algorithm="online"),
            merged(xp, merge_state, o[:, 0], lse[:, 0], o[:, 1], lse[:, 1]),
            in_place(xp, o[:, 0], lse[:, 0], o[:, 1], lse[:, 1]),
        ):
            assert np.array_equal(np.isnan(got[1]), [False, True, False, False])
            assert np.array_equal(np.isnan(got[0]), np.repeat(np.isnan(got[1])[:, None], 8, 1))

    def test_mixed_bases_are_right_only_when_said(self, xp):
        # a prefix of 3072 tokens and a suffix of 64, all scores 0: lse = log of the count
        o = np.array([[[1.0], [0.0]]], np.float32)
        base_2 = np.log2(np.array([[3072, 64]])).astype(np.float32)
        want = 3072 / (3072 + 64)
        # a rounding of an lse of 11.6, its difference, and ten more of a number below 1
        bound = U32 * (4 * 11.6 + 10)
        got, got_lse = merged(xp, merge_states, o, base_2, lse_base="2")
        assert abs(got.item() - want) <= bound
        assert abs(got_lse.item() - np.log2(3072 + 64)) <= bound
        assert abs(merged(xp, merge_states, o, base_2 * np.float32(np.log(2)))[0].item() - want) <= bound
        # the suffix's lse in the wrong base: plausible, and off by ten per cent
        mixed = np.array([[np.log(3072), np.log2(64)]], np.float32)
        wrong = merged(xp, merge_states, o, mixed)[0].item()
        assert abs(wrong - 3072 / (3072 + np.exp(6))) <= bound
        assert abs(wrong / want - 1) > 0.09


class TestAlgebra:
    @every_dtype
    @pytest.mark.parametrize("garbage", [0.0, np.nan, np.inf])
    def test_the_identity_is_exact(self, xp, dtype, garbage):
        o, lse = states((6,), 1, dtype=dtype)
        o, lse = o[:, 0], (100 * lse[:, 0]).astype(np.float32)
        nothing, never = np.full_like(o, garbage), np.full_like(lse, -np.inf)
        assert_same_bits(merged(xp, merge_state, o, lse, nothing, never), (o, lse))
        assert_same_bits(merged(xp, merge_state, nothing, never, o, lse), (o, lse))
        assert_same_bits(in_place(xp, nothing, never, o, lse), (o, lse))
        assert_empty(merged(xp, merge_state, nothing, never, nothing, never))
        padded = np.stack([nothing, o, nothing, nothing], 1), np.stack([never, lse, never, never], 1)
        for algorithm in ALGORITHMS:
            assert_same_bits(merged(xp, merge_states, *padded, algorithm=algorithm), (o, lse))

    def test_associative_and_commutative_within_roundoff(self, xp):
        o, lse = states((50,), 3, seed=4)
        state = [(o[:, i], lse[:, i]) for i in range(3)]
        join = lambda a, b: merged(xp, merge_state, *a, *b)
        want, want_lse = reference.merge(o, lse, precision=F64)
        e_o, e_lse = merge_bound(o, lse, want, want_lse)
        # the state in between is stored once more: o rounded, and its lse off by e_lse, which is an error of its weight
        e_o = e_o + stored(np.abs(o).max(1), "float32") + 2 * e_lse[:, None] * np.abs(o).max(1)
        a, b, c = state
        for got in (join(join(a, b), c), join(a, join(b, c)), join(join(c, a), b), merged(xp, merge_states, o, lse)):
            assert_within(got[0], want, e_o)
            assert_within(got[1], want_lse, 2 * e_lse)
