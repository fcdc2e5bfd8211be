"""Every line of the contract that applies to the reference."""

import math
from dataclasses import replace

import numpy as np
import pytest
from reference_cases import (
    ALGORITHMS,
    F64,
    INT_MAX,
    U32,
    every_form,
    normal,
    numbers,
    paged,
    random_states,
    states_equal,
)

from reference import Precision, exact, merge, paged_decode, partial, split_ranges


def test_no_requests_and_no_pages():
    for lens in ([], [0, 0]):
        q, k, v, _ = normal(lens)
        args = paged(q, k, v, lens, extra_entries=0)
        assert args[3].shape == (len(lens), 0)
        results = [paged_decode(*args), exact.paged_decode(*args)]
        results += [merge(*partial(*args, num_splits=3)), merge(*partial(*args, pages_per_split=2))]
        for out, lse in results:
            assert out.shape == q.shape
            assert np.all(out == 0)
            assert np.all(lse == -math.inf)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_empties_merge_to_empty_and_are_selected_away(algorithm, dtype):
    precision = replace(F64, merge=dtype)
    o, lse = np.full((2, 3, 4), np.nan), np.full((2, 3), -np.inf)
    merged = merge(o, lse, precision=precision, algorithm=algorithm)
    assert np.array_equal(merged[0], np.zeros((2, 4)))
    assert np.array_equal(merged[1], [-np.inf, -np.inf])
    o[0, 1], lse[0, 1] = 2, -7
    merged = merge(o, lse, precision=precision, algorithm=algorithm)
    assert np.array_equal(merged[0], [[2] * 4, [0] * 4])
    assert np.array_equal(merged[1], [-7, -np.inf])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_or_inf_in_a_merged_state_is_never_empty(algorithm, position, bad):
    o, lse = np.ones((2, 3, 4)), np.zeros((2, 3))
    lse[0, position] = bad
    merged = merge(o, lse, algorithm=algorithm)
    assert np.all(np.isnan(merged[0]) == [[True] * 4, [False] * 4])
    assert np.all(np.isnan(merged[1]) == [True, False])
    # beside empties, too
    lse[0, np.arange(3) != position] = -np.inf
    merged = merge(o, lse, algorithm=algorithm)
    assert np.isnan(merged[1][0])
    assert np.all(np.isnan(merged[0][0]))
    o, lse = np.ones((2, 3, 4)), np.zeros((2, 3))
    o[0, position, 1] = bad
    merged = merge(o, lse, algorithm=algorithm)
    assert np.array_equal(np.argwhere(~np.isfinite(merged[0])), [[0, 1]])
    assert np.all(np.isfinite(merged[1]))


@pytest.mark.parametrize("token", [0, 7, 12])
def test_real_nan_reaches_exactly_its_outputs(token):
    # 4 query heads on 2 KV heads, the second KV head poisoned in request 0, 13 tokens
    for bad in (np.nan, np.inf, -np.inf):
        q, k, v, lens = normal([13, 6])
        v[0, token, 1, 5] = bad
        for o, lse in every_form(paged(q, k, v, lens)):
            assert np.array_equal(np.argwhere(~np.isfinite(o)), [[0, 2, 5], [0, 3, 5]])
            assert np.all(np.isfinite(lse))
    q, k, v, lens = normal([13, 6])
    k[0, token, 1, 5] = np.nan
    for o, lse in every_form(paged(q, k, v, lens)):
        assert np.array_equal(np.argwhere(np.isnan(lse)), [[0, 2], [0, 3]])
        assert np.array_equal(np.isnan(o), np.broadcast_to(np.isnan(lse)[..., None], o.shape))
    q, k, v, lens = normal([13, 6, 0])
    q[:, 1, 3] = np.nan
    for o, lse in every_form(paged(q, k, v, lens)):
        # a request of no keys never looks at its q
        assert np.array_equal(np.argwhere(np.isnan(lse)), [[0, 1], [1, 1]])
        assert np.array_equal(np.isnan(o), np.broadcast_to(np.isnan(lse)[..., None], o.shape))


def test_nan_value_under_an_underflowed_weight_is_not_lost():
    args = numbers([[0] * 9 + [-2000, 0], [1] * 9 + [np.inf, 1]])
    for o, lse in every_form(paged(*args), sm_scale=1.0):
        assert not np.isfinite(o[0, 0, 0])
        assert np.isfinite(lse[0, 0])


def test_score_of_minus_infinity_has_weight_zero():
    visible = numbers([[1, 2, 3, 0], [10, 20, 30, 40]])
    # the hidden keys fill a page of their own and half of another, with values that must not be looked at
    hidden = numbers([[1, 2, *[-np.inf] * 6, 3, 0], [10, 20, np.inf, *[np.nan] * 5, 30, 40]])
    pairs = zip(*(every_form(paged(*case), sm_scale=1.0) for case in (hidden, visible)), strict=True)
    for (o, lse), (want, want_lse) in pairs:
        # float32 numbers of up to 30, a dozen roundings each
        assert np.abs(o - want).max() <= 24 * 30 * U32
        assert np.abs(lse - want_lse).max() <= 24 * 3 * U32
    for o, lse in every_form(paged(*numbers([[-np.inf] * 9, [np.nan] * 9])), sm_scale=1.0):
        assert o == 0
        assert lse == -np.inf
    for o, lse in every_form(paged(*numbers([[0] * 8 + [np.inf], [1] * 9])), sm_scale=1.0):
        assert np.isnan(o)
        assert np.isnan(lse)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_what_no_request_owns_is_never_read(layout, window, poison):
    inputs = normal([13, 0, 4, 1], dtype=np.float32)
    clean = list(every_form(paged(*inputs, layout=layout, poison=0), layout=layout, window=window))
    args = paged(*inputs, layout=layout, poison=poison)
    if window:
        # the pages wholly before the window: 10 tokens of the first request, one of the third
        args[3][0, :2] = [-1, INT_MAX]
    for got, want in zip(every_form(args, layout=layout, window=window), clean, strict=True):
        assert states_equal(got, want)


def test_a_page_id_outside_the_pool_is_refused_where_it_is_read():
    for bad in (-1, INT_MAX):
        args = paged(*normal([13]))
        args[3][0, 1] = bad
        for decode in (paged_decode, exact.paged_decode, lambda *a: partial(*a, num_splits=2)):
            with pytest.raises(ValueError, match=r"^page_table: expected page ids in \[0, \d+\), got "):
                decode(*args)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": np.zeros((1, 4, 8), np.int32)}, TypeError, "q: expected one of"),
        ({"q": [[1.0]]}, TypeError, "q: expected a NumPy array"),
        ({"q": np.zeros((1, 8))}, ValueError, r"q: expected shape \[any, any, any\], got \[1, 8\]"),
        ({"q": np.zeros((1, 3, 8))}, ValueError, "q: expected num_q_heads a multiple of 2"),
        ({"q": np.zeros((1, 0, 8))}, ValueError, "q: expected num_q_heads a multiple of 2 KV heads, got 0"),
        ({"k_cache": np.zeros((6, 4, 2, 7))}, ValueError, "k_cache: expected shape"),
        ({"v_cache": np.zeros((6, 4, 1, 8))}, ValueError, "v_cache: expected shape"),
        ({"page_table": np.zeros((1, 4))}, TypeError, "page_table: expected an integer dtype"),
        ({"page_table": np.zeros((2, 4), int)}, ValueError, "page_table: expected shape"),
        ({"context_lens": np.array([-1])}, ValueError, r"context_lens: expected lengths in \[0, 20\]"),
        ({"context_lens": np.array([21])}, ValueError, r"context_lens: expected lengths in \[0, 20\], got"),
        ({"sm_scale": math.nan}, ValueError, "sm_scale: expected a finite number"),
        ({"layout": "DHN"}, ValueError, "layout: expected 'NHD' or 'HND', got 'DHN'"),
        ({"window": 0}, ValueError, "window: expected at least 1, got 0"),
        ({"window": 1.5}, TypeError, "window: expected an integer"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a finite number above 0"),
        ({"alibi_slopes": np.zeros(3)}, ValueError, r"alibi_slopes: expected shape \[4\], got \[3\]"),
    ],
)
def test_bad_arguments(change, error, text):
    names = ("q", "k_cache", "v_cache", "page_table", "context_lens")
    arguments = dict(zip(names, paged(*normal([10])), strict=True)) | change
    for decode, more in ((paged_decode, {}), (partial, {"num_splits": 2})):
        with pytest.raises(error, match="^" + text):
            decode(**arguments, **more)


def test_bad_arguments_of_split_and_merge():
    args, (o, lse) = paged(*normal([10])), random_states(2)
    bad = [
        (lambda: partial(*args), "num_splits: expected either it or pages_per_split, got None and None"),
        (lambda: partial(*args, num_splits=0), "num_splits: expected at least 1, got 0"),
        (lambda: partial(*args, pages_per_split=0), "pages_per_split: expected at least 1, got 0"),
        (lambda: split_ranges(-1, 4, 1), "context_len: expected at least 0, got -1"),
        (lambda: Precision(p="float8"), "p: expected one of float16"),
        (lambda: merge(o[:, :0], lse[:, :0]), "lse_part: expected at least one state"),
        (lambda: merge(o, lse[:, :1]), "lse_part: expected shape"),
        (lambda: merge(o, lse, algorithm="tree"), "algorithm: expected one of max_first, online, got 'tree'"),
        (lambda: exact.merge(o, lse * np.inf), r"lse_part: expected finite numbers or -inf"),
        (lambda: exact.paged_decode(args[0] * np.inf, *args[1:]), "q, k_cache, v_cache: expected finite"),
    ]
    for call, text in bad:
        with pytest.raises(ValueError, match="^" + text):
            call()
