"""The oracle against worked numbers, 60 digits and plain loops."""

import math

import ml_dtypes
import numpy as np
import pytest
from reference_cases import (
    ALGORITHMS,
    F64,
    U64,
    budget,
    normal,
    numbers,
    paged,
    pairwise_depth,
    states_equal,
    with_scores,
)

from reference import attend, exact, gather, merge, merge_pair, paged_decode, partial, scores, split_ranges


@pytest.mark.parametrize(
    ("context_len", "ranges", "tokens_of_last"),
    [
        (1000, [(0, 16), (16, 32), (32, 48), (48, 63)], 8),
        (37, [(0, 1), (1, 2), (2, 3), (3, 3)], 5),
        (100, [(0, 2), (2, 4), (4, 6), (6, 7)], 4),
        (0, [(0, 0), (0, 0), (0, 0), (0, 0)], None),
    ],
)
def test_page_ranges(context_len, ranges, tokens_of_last):
    assert split_ranges(context_len, page_size=16, num_splits=4) == ranges
    if tokens_of_last is not None:
        assert context_len - 16 * (max(end for _, end in ranges) - 1) == tokens_of_last


@pytest.mark.parametrize("num_splits", [1, 2, 3, 5, 16, 100])
def test_page_ranges_tile_the_context(num_splits):
    for context_len in range(60):
        ranges = split_ranges(context_len, 3, num_splits)
        pages = [page for begin, end in ranges for page in range(begin, end)]
        assert len(ranges) == num_splits
        assert pages == list(range(-(-context_len // 3)))
        assert max(end - begin for begin, end in ranges) == -(-len(pages) // num_splits)


HAND = numbers([[1, 2, 3, 0], [10, 20, 30, 40]])
HAND_OUT = (10 * math.e + 20 * math.e**2 + 30 * math.e**3 + 40) / (math.e + math.e**2 + math.e**3 + 1)


def test_merge_by_hand():
    args = paged(*HAND, page_size=2)
    o, lse = partial(*args, num_splits=2, sm_scale=1.0, precision=F64)
    o, lse, m = o[0, 0, :, 0], lse[0, 0], np.array([2.0, 3.0])
    e = math.exp(-1)
    # a handful of float64 operations each; the figures reach 30, so 8 roundings of that
    eps = 8 * U64 * 30
    assert np.abs(np.exp(lse - m) - [1 + e, 1 + e**3]).max() <= eps
    assert np.abs(lse - [2 + math.log(1 + e), 3 + math.log(1 + e**3)]).max() <= eps
    assert np.abs(o - [(10 * e + 20) / (1 + e), (30 + 40 * e**3) / (1 + e**3)]).max() <= eps
    assert [round(x, 2) for x in o] == [17.31, 30.47]
    assert [round(x, 3) for x in (*np.exp(lse - m), *lse)] == [1.368, 1.050, 2.313, 3.049]
    assert round(math.exp(lse[0] - lse[1]), 3) == 0.479
    merged, merged_lse = merge(o[:, None], lse, precision=F64)
    whole, whole_lse = paged_decode(*args, sm_scale=1.0)
    for got in (merged[0], whole[0, 0, 0]):
        assert abs(got - HAND_OUT) <= eps
        assert str(got).startswith("26.208871")
    assert abs(merged_lse - whole_lse[0, 0]) <= eps
    # The plain average is another number altogether.
    assert round(o.mean(), 2) == 23.89


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weights_matter_only_if_the_outputs_differ(algorithm):
    lse = np.array([0.0, 10.0])
    alike, _ = merge(np.ones((2, 2)), lse, precision=F64, algorithm=algorithm)
    # (1 + w) / (1 + w)
    assert np.array_equal(alike, [1, 1])
    differ, _ = merge(np.eye(2), lse, precision=F64, algorithm=algorithm)
    share = math.exp(-10) / (1 + math.exp(-10))
    # exp, sum, division: 4 roundings on each element's own scale
    assert np.all(np.abs(differ - [share, 1 - share]) <= 4 * U64 * np.array([share, 1]))
    assert f"{differ[0]:.5f} {differ[1]:.5f}" == "0.00005 0.99995"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_empty_split_unguarded_is_nan_and_guarded_is_the_identity(algorithm):
    lse = np.array([1.0, 2.0, -np.inf, -np.inf])
    o = np.array([[3.0], [4.0], [np.nan], [np.inf]])
    with np.errstate(invalid="ignore"):
        assert np.isnan((np.exp(lse) @ o)[0])
    got = merge(o, lse, precision=F64, algorithm=algorithm)
    assert states_equal(got, merge(o[:2], lse[:2], precision=F64, algorithm=algorithm))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_merge_subtracts_the_maximum(algorithm):
    with np.errstate(over="ignore"):
        assert np.exp(np.float32(300)) == np.inf
    o, lse = merge(np.array([[1.0], [3.0]]), np.array([300.0, 300.0]), algorithm=algorithm)
    assert o == 2
    assert lse == np.float32(300 + math.log(2))


def test_merging_mixed_bases_is_wrong_unless_the_lse_are_alike():
    o, lse = np.eye(2), np.array([1.0, 3.0])
    right = merge(o, lse, precision=F64)[0][0]
    mixed = merge(o, np.array([lse[0] / math.log(2), lse[1]]), precision=F64)[0][0]
    assert abs(right - 1 / (1 + math.exp(2))) <= 4 * U64
    # e^1.443 counted where e^1 belongs
    assert 0.4 < mixed / right - 1 < 0.5
    alike = np.array([2.0, 2.0])
    assert np.array_equal(merge(o, alike)[0], merge(o, alike / math.log(2))[0])


def test_cutting_by_tokens_is_legal_but_whole_pages_at_a_token_cut_count_twice():
    q, k_cache, v_cache, table, lens = paged(*normal([10]), page_size=4)
    out, lse = paged_decode(q, k_cache, v_cache, table, lens)

    def state(begin, end):
        k, v = gather(k_cache, table[0], begin, end), gather(v_cache, table[0], begin, end)
        return attend(scores(q[0], k, begin, 10), v)

    by_tokens = merge_pair(*state(0, 5), *state(5, 10), precision=F64)
    # |o| and lse are below 4, and a state is some ten roundings deep
    assert np.abs(by_tokens[0] - out[0]).max() <= 40 * U64
    assert np.abs(by_tokens[1] - lse[0]).max() <= 40 * U64
    border_page_twice = merge_pair(*state(0, 8), *state(4, 10), precision=F64)
    assert np.abs(border_page_twice[0] - out[0]).max() > 0.01
    assert np.abs(border_page_twice[1] - lse[0]).min() > 0.01


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_mean_mark_of_a_year_from_its_classes(algorithm):
    marks = [[1.0, 2.0, 3.0], [5.0], [4.0, 6.0]]
    means, sizes = np.array([[np.mean(c)] for c in marks]), np.array([len(c) for c in marks])
    mean, size = merge(means, np.log(sizes), precision=F64, algorithm=algorithm)
    # three weights with an exp of a log each: 12 roundings of numbers below 6
    assert abs(mean[0] - 21 / 6) <= 12 * 6 * U64
    assert abs(size - math.log(6)) <= 12 * U64
    assert abs(means.mean() - 21 / 6) > 0.4


FAMILIES = {
    "normal": lambda rng, n, v: (rng.standard_normal(n), v),
    "scores +300": lambda rng, n, v: (300 + rng.standard_normal(n), v),
    "scores -300": lambda rng, n, v: (-300 + rng.standard_normal(n), v),
    "scores +-300": lambda rng, n, v: (300 * (-1.0) ** np.arange(n) + rng.standard_normal(n), v),
    "scores -6000": lambda rng, n, v: (-6000 + rng.standard_normal(n), v),
    "cancelling v": lambda rng, n, v: (
        rng.standard_normal(n) / 99,
        (-1.0) ** np.arange(n)[:, None] * (1 + v / 20),
    ),
    "dominant key": lambda rng, n, v: (np.where(np.arange(n) == n // 3, 30, rng.standard_normal(n)), v),
    "equal": lambda rng, n, v: (np.zeros(n), v),
}


def against_exact(family, head_dim, dtype, seed):
    """Dense against mpmath on one case: error and budget of o, the same of lse, and sum_j pi_j |v_j|."""
    rng = np.random.default_rng(seed)
    target, v = FAMILIES[family](rng, 70, rng.standard_normal((70, head_dim)))
    q, k, v, lens = with_scores(target, v, dtype, seed)
    args = paged(q, k, v, lens)
    (out, lse), (want, want_lse) = paged_decode(*args), exact.paged_decode(*args)
    error = [np.abs(exact.to_float64(w - exact.to_mpf(x))) for w, x in ((want, out), (want_lse, lse))]
    e_o, e_lse = budget(q[0], k[0], v[0], U64, pairwise_depth(70), out[0], lse[0])
    scale_o = attend(scores(q[0], k[0].astype(np.float64), 0, 70), np.abs(v[0].astype(np.float64)))[0]
    return error[0][0], e_o, error[1][0], e_lse, scale_o


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_mpmath_bounds_the_oracle(family, dtype):
    for seed, head_dim in enumerate((3, 64, 128)):
        error_o, e_o, error_lse, e_lse, _ = against_exact(family, head_dim, dtype, seed)
        assert np.all(error_o <= e_o), (head_dim, np.max(error_o / e_o))
        assert np.all(error_lse <= e_lse), (head_dim, np.max(error_lse / e_lse))


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"scores +-300", "scores -6000"}))
def test_oracle_error_where_scores_are_exact(family):
    # fp16 products are exact in float64 and so, nearly always, is their sum; 1/8 is exact. What is left: exp
    # and s - m (3 roundings), twice a pairwise sum of depth 19 that rarely errs one way, a division: 12
    # roundings of sum_j pi_j |v_j| in o. lse is rounded once, by up to 2^-45 = 2.8e-14 at 300, and log l
    # adds 1e-15.
    for seed in range(3):
        error_o, _, error_lse, _, scale_o = against_exact(family, 64, np.float16, seed)
        assert np.all(error_o <= 1.3e-15 * scale_o), np.max(error_o / scale_o)
        assert np.all(error_lse <= 3e-14)


def loop_decode(args, layout, sm_scale, window, softcap, sinks, alibi_slopes):
    """The definition token by token, in Python floats with fsum, no maximum subtracted."""
    q, k_cache, v_cache, table, lens = args
    page_size = k_cache.shape[1 if layout == "NHD" else 2]
    num_kv_heads = k_cache.shape[2 if layout == "NHD" else 1]
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
    for b, h in np.ndindex(q.shape[:2]):
        kv_head = h * num_kv_heads // q.shape[1]
        weights, values = [math.exp(sinks[h])], [[0.0] * q.shape[2]]
        for j in range(lens[b]):
            if j < lens[b] - window:
                continue
            slot = (j % page_size, kv_head) if layout == "NHD" else (kv_head, j % page_size)
            at = (table[b, j // page_size], *slot)
            s = sm_scale * math.fsum(float(x) * float(y) for x, y in zip(q[b, h], k_cache[at], strict=True))
            s = softcap * math.tanh((s + alibi_slopes[h] * (j - lens[b] + 1)) / softcap)
            weights.append(math.exp(s))
            values.append(v_cache[at].tolist())
        l = math.fsum(weights)
        columns = zip(*values, strict=True)
        out[b, h] = [math.fsum(w * x for w, x in zip(weights, c, strict=True)) / l for c in columns]
        lse[b, h] = math.log(l)
    return out, lse


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_oracle_against_plain_loops_with_every_option(layout, dtype):
    q, k, v, lens = normal([13, 0, 30, 1], num_q_heads=6, dtype=dtype)
    args = paged(q, k, v, lens, layout=layout)
    options = {"sm_scale": 0.7, "window": 9, "softcap": 2.5}
    options |= {"sinks": np.linspace(-2, 2, 6), "alibi_slopes": np.linspace(0.05, 0.5, 6)}
    out, lse = paged_decode(*args, layout=layout, **options)
    want, want_lse = loop_decode(args, layout, **options)
    # Scores are below the cap of 2.5 and |v| below 5: a decode of 10 keys is some 60 roundings of 5; twice.
    eps = 2 * 60 * 5 * U64
    assert np.abs(out - want).max() <= eps
    assert np.abs(lse - want_lse).max() <= eps
    for name, value in options.items():
        # every option has its effect: without it the result is another one
        without = paged_decode(*args, layout=layout, **(options | {name: None}))
        assert np.abs(without[1] - lse).max() > 0.01, (name, value)
    want, want_lse = exact.paged_decode(*args, layout=layout, **options)
    assert np.abs(exact.to_float64(want) - out).max() <= eps
    assert np.abs(exact.to_float64(want_lse) - lse).max() <= eps


def test_sink_is_a_state_of_its_own():
    sinks = np.array([-1.0, 0.0, 2.0, 40.0])
    args = paged(*normal([9, 0]))
    out, lse = paged_decode(*args, sinks=sinks)
    assert np.array_equal(out[1], np.zeros_like(out[1]))
    assert np.array_equal(lse[1], sinks)
    for num_splits in (1, 3):
        states = partial(*args, num_splits=num_splits, precision=F64)
        for algorithm in ALGORITHMS:
            o, l = merge(*states, sinks=sinks, precision=F64, algorithm=algorithm)
            # numbers below 4 (o) and about 40 (lse), some 60 roundings deep
            assert np.abs(o - out).max() <= 60 * 4 * U64
            assert np.abs(l - lse).max() <= 60 * 40 * U64
