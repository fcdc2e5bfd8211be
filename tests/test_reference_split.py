"""The split form: equal to the oracle for every cut, and rounding exactly where its precision says."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from reference_cases import (
    ALGORITHMS,
    F64,
    U32,
    U64,
    budget,
    normal,
    numbers,
    paged,
    random_states,
    states_equal,
)

from reference import Precision, exact, merge, merge_pair, paged_decode, partial
from reference.split import DTYPES


@pytest.mark.parametrize(("precision", "u"), [("float64", U64), ("float32", U32)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_split_equals_dense_for_every_split_count(precision, u, algorithm):
    q, k, v, lens = normal([37, 0, 1, 8], dtype=np.float16)
    args = paged(q, k, v, lens)
    out, lse = paged_decode(*args)
    for num_splits in range(1, 13):
        states = partial(*args, num_splits=num_splits, precision=Precision.uniform(precision))
        assert states[0].shape == (4, 4, num_splits, 8)
        assert states[1].shape == (4, 4, num_splits)
        o, l = merge(*states, precision=Precision.uniform(precision), algorithm=algorithm)
        assert o.dtype == l.dtype == precision
        for b, n in enumerate(lens):
            if n == 0:
                assert np.array_equal(o[b], np.zeros_like(o[b]))
                assert np.all(l[b] == -np.inf)
                continue
            # Sequential sums: a rounding per token and state; the merge's exp and rescales are 4 a state.
            e_o, e_lse = budget(q[b], k[b, :n], v[b, :n], u, n + 5 * num_splits, out[b], lse[b])
            assert np.all(np.abs(o[b] - out[b]) <= e_o), (num_splits, b)
            assert np.all(np.abs(l[b] - lse[b]) <= e_lse), (num_splits, b)


@pytest.mark.parametrize("window", [1, 3, 5, 17, 100])
def test_split_takes_the_options_of_dense(window):
    options = {"window": window, "softcap": 2.5, "alibi_slopes": np.linspace(0.05, 0.5, 4), "sm_scale": 0.7}
    args = paged(*normal([18, 5, 0]), layout="HND")
    out, lse = paged_decode(*args, layout="HND", **options)
    for num_splits in (1, 2, 4, 7):
        states = partial(*args, layout="HND", num_splits=num_splits, precision=F64, **options)
        o, l = merge(*states, precision=F64)
        # scores capped at 2.5, |v| below 5, 18 keys and 7 states: 80 roundings of 5
        assert np.abs(o - out).max() <= 80 * 5 * U64
        assert np.abs(l[:2] - lse[:2]).max() <= 80 * 5 * U64
        assert np.all(l[2] == -np.inf)
        if window == 1:
            # the window leaves all splits but the one of the last token empty
            assert np.all(np.isfinite(states[1]).sum(axis=-1) == [[1], [1], [0]])


def test_pages_per_split_does_not_look_at_batch_mates():
    q, k, v, lens = normal([37, 9])
    o, lse = partial(*paged(q, k, v, lens), pages_per_split=3)
    assert lse.shape == (2, 4, 4)
    alone_o, alone_lse = partial(*paged(q[1:], k[1:], v[1:], lens[1:]), pages_per_split=3)
    assert alone_lse.shape == (1, 4, 1)
    assert states_equal((o[1:, :, :1], lse[1:, :, :1]), (alone_o, alone_lse))
    assert np.all(lse[1, :, 1:] == -np.inf)
    by_count = partial(*paged(q[:1], k[:1], v[:1], lens[:1]), num_splits=4)
    assert states_equal((o[:1], lse[:1]), by_count)


@pytest.mark.parametrize("spread", [0, 3, 300])
def test_merge_against_mpmath(spread):
    o, lse = random_states(9, spread=spread)
    want, want_lse = (exact.to_float64(x) for x in exact.merge(o, lse))
    scale = merge(np.abs(o), lse, precision=F64)[0]
    for algorithm in ALGORITHMS:
        got, got_lse = merge(o, lse, precision=F64, algorithm=algorithm)
        # lse - m and exp err by (|lse - m| + 2) u in each weight, 9 additions of products twice, 9 rescales
        roundings = 2 * np.abs(lse).max() + 40
        assert np.all(np.abs(got - want) <= roundings * U64 * scale)
        assert np.all(np.abs(got_lse - want_lse) <= roundings * U64)


def test_merge_is_associative_commutative_and_has_an_identity():
    o, lse = random_states(3)
    a, b, c = ((o[:, i], lse[:, i]) for i in range(3))
    identity = np.full_like(o[:, 0], np.nan), np.full_like(lse[:, 0], -np.inf)

    def pair(x, y):
        return merge_pair(*x, *y, precision=F64)

    # w * o with w = 1 and a division by 1: bit for bit
    assert states_equal(pair(a, identity), a)
    assert states_equal(pair(identity, a), a)
    # addition of two numbers commutes, bit for bit
    assert states_equal(pair(a, b), pair(b, a))
    left, right = pair(pair(a, b), c), pair(a, pair(b, c))
    # |o| and |lse| are below 8; each nesting is about 12 roundings of them
    assert np.abs(left[0] - right[0]).max() <= 24 * 8 * U64
    assert np.abs(left[1] - right[1]).max() <= 24 * 8 * U64


STAGES = ("scores", "p", "accumulator", "o", "lse")
NARROW = ("float16", "bfloat16", "float32")
ONE_STAGE = [replace(F64, **{stage: dtype}) for stage in STAGES for dtype in NARROW]
UNIFORM = [Precision.uniform(dtype) for dtype in DTYPES]


def rounder(dtype):
    """Round a Python float to a dtype."""
    return lambda x: float(np.float64(x).astype(DTYPES[dtype]))


def loop_state(q, k, v, sm_scale, precision):
    """One head's state, one Python float and one rounding at a time, as `Precision` states them."""
    r_s, r_p, r_acc, r_o, r_lse = (rounder(getattr(precision, stage)) for stage in STAGES)
    s = []
    for key in k:
        products = [r_s(r_s(x) * r_s(y)) for x, y in zip(q, key, strict=True)]
        dot = products[0]
        for product in products[1:]:
            dot = r_s(dot + product)
        s.append(r_s(dot * r_s(sm_scale)))
    m, l, acc = max(s), 0.0, [0.0] * len(v[0])
    for s_j, row in zip(s, v, strict=True):
        p = r_acc(r_p(math.exp(r_s(s_j - m))))
        l = r_acc(l + p)
        acc = [r_acc(a + r_acc(p * r_acc(x))) for a, x in zip(acc, row, strict=True)]
    return [r_o(r_acc(a / l)) for a in acc], r_lse(r_acc(r_acc(m) + r_acc(math.log(l))))


def last_bits(dtype):
    """Only float64 tells the exp and log of Python and of NumPy, a bit apart, from each other: 40 bits."""
    return 40 * U64 if dtype == "float64" else 0


@pytest.mark.parametrize("precision", ONE_STAGE + UNIFORM, ids=repr)
def test_every_rounding_is_where_the_stage_says(precision):
    q, k, v, lens = normal([21], num_q_heads=1, num_kv_heads=1, head_dim=6)
    o, lse = partial(*paged(q, k, v, lens), num_splits=1, sm_scale=0.3, precision=precision)
    want_o, want_lse = loop_state(q[0, 0], k[0, :, 0], v[0, :, 0], 0.3, precision)
    assert (o.dtype, lse.dtype) == (precision.o, precision.lse)
    assert np.abs(o[0, 0, 0].astype(np.float64) - want_o).max() <= last_bits(precision.o)
    # lse is about 4
    assert abs(float(lse[0, 0, 0]) - want_lse) <= 4 * last_bits(precision.lse)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rounding_of_the_merge(algorithm, dtype):
    r = rounder(dtype)
    o, lse = random_states(7)
    got, got_lse = merge(o, lse, precision=replace(F64, merge=dtype), algorithm=algorithm)
    assert got.dtype == got_lse.dtype == dtype
    for row in range(5):
        x, y = [r(x) for x in o[row, :, 0]], [r(y) for y in lse[row]]
        m = max(y) if algorithm == "max_first" else -math.inf
        acc = l = 0.0
        for x_s, y_s in zip(x, y, strict=True):
            m_before, m = m, max(m, y_s)
            w, rescale = r(math.exp(r(y_s - m))), r(math.exp(r(m_before - m)))
            acc, l = r(r(acc * rescale) + r(w * x_s)), r(r(l * rescale) + w)
        assert abs(float(got[row, 0]) - r(acc / l)) <= last_bits(dtype)
        assert abs(float(got_lse[row]) - r(m + r(math.log(l)))) <= 4 * last_bits(dtype)


@pytest.mark.parametrize("stage", [*STAGES, "merge"])
def test_each_stage_changes_the_result(stage):
    q, k, v, lens = normal([64], head_dim=16, dtype=np.float16)
    args = paged(q, k, v, lens)

    def decode(precision):
        return merge(*partial(*args, num_splits=4, precision=precision), precision=precision)

    want, want_lse = decode(F64)
    previous = 0.0
    for dtype, u in (("float32", U32), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        o, lse = decode(replace(F64, **{stage: dtype}))
        error = np.sqrt(np.mean((o.astype(np.float64) - want) ** 2))
        # |o| is about 0.3 here: more than a tenth of one rounding of that, and growing with u
        assert max(0.03 * u, 3 * previous) < error, (dtype, error / u)
        previous = error
        if stage != "o":
            assert np.abs(lse - want_lse).max() > 0.03 * u


def test_stored_states_are_the_float32_ones_rounded_once():
    args = paged(*normal([64], dtype=np.float16))
    o, lse = partial(*args, num_splits=4)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        name = np.dtype(dtype).name
        o_16, lse_16 = partial(*args, num_splits=4, precision=Precision(o=name, lse=name))
        assert states_equal((o_16, lse_16), (o.astype(dtype), lse.astype(dtype)))


def test_a_float16_partial_overflows_to_inf_where_the_value_does():
    o, lse = partial(*paged(*numbers([[0, 0], [1e5, 1e5]])), num_splits=1, precision=Precision(o="float16"))
    assert o == np.inf
    assert lse == np.float32(math.log(2))


@pytest.mark.parametrize(("dtype", "stalls_at"), [("float16", 2048), ("bfloat16", 256), ("float32", 3000)])
def test_accumulator_stalls_where_its_format_does(dtype, stalls_at):
    # 3000 equal keys: adding 1 to 2^11 in float16, or 2^8 in bfloat16, changes nothing (ties to even)
    args = paged(*numbers([[0] * 3000, [1] * 3000]))
    o, lse = partial(*args, num_splits=1, sm_scale=1.0, precision=replace(F64, accumulator=dtype))
    assert o == 1
    assert lse == rounder(dtype)(math.log(stalls_at))


def test_float16_partials_cost_one_more_output_rounding():
    # Zero-mean values and comparable splits: each o_s is about sqrt(S) larger than out and weighs 1/S, so
    # that the S roundings together are as large as the one of the output, for every S: rho = sqrt 2.
    lens = [512] * 2
    args = paged(*normal(lens, num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=np.float16), page_size=16)
    want = paged_decode(*args)[0]

    def rms(x):
        return math.sqrt(np.mean(x * x))

    ideal = rms(want.astype(np.float16) - want)
    for num_splits in (2, 8):
        o_part, lse_part = partial(*args, num_splits=num_splits, precision=F64)
        rho = {}
        for dtype in (np.float32, np.float16):
            out = merge(o_part.astype(dtype), lse_part)[0].astype(np.float16)
            rho[dtype] = rms(out - want) / ideal
        ulp = np.spacing(np.abs(o_part).astype(np.float16)).astype(np.float64)
        ulp_out = np.spacing(np.abs(want).astype(np.float16)).astype(np.float64)
        weights = np.exp(lse_part - merge(o_part, lse_part, precision=F64)[1][..., None])
        predicted = math.sqrt(1 + np.sum((weights[..., None] * ulp) ** 2) / np.sum(ulp_out**2))
        # 8192 outputs give an RMS to about 1/sqrt(2 * 8192) = 0.8 %, the ulp model of a rounding likewise
        assert abs(rho[np.float32] - 1) < 0.02
        assert abs(rho[np.float16] / predicted - 1) < 0.03
        # binades make sqrt 2 itself approximate
        assert abs(rho[np.float16] / math.sqrt(2) - 1) < 0.1


def test_sixteen_bit_lse_is_worse_by_the_size_of_the_lse():
    # A rounded lse is an absolute error in an exponent: u |lse| in every weight.
    rng = np.random.default_rng(0)
    o, lse = rng.standard_normal((200, 8, 16)), 300 + rng.standard_normal((200, 8))
    want = merge(o, lse, precision=F64)[0]
    error_o = np.abs(merge(o.astype(np.float16), lse, precision=F64)[0] - want)
    error_lse = np.abs(merge(o, lse.astype(np.float16), precision=F64)[0] - want)
    assert 100 < math.sqrt(np.mean(error_lse**2) / np.mean(error_o**2)) < 600
