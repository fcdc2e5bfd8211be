"""The worked example: exactly the numbers that a person gets on paper."""

import math

import numpy as np
import pytest

from verify import trace
from verify.__main__ import main

BY_HAND = (np.array([1.0, 2, 3, 0]), np.array([[10.0], [20], [30], [40]]))


def device(xp):
    return "cpu" if xp is np else "gpu"


def test_merge_by_hand(xp):
    worked = trace.trace(*BY_HAND, page_size=1, num_splits=2, device=device(xp))
    e = math.exp
    first, second = worked.splits
    assert (first.pages, first.tokens, second.pages, second.tokens) == ((0, 2), (0, 2), (2, 4), (2, 4))
    assert (first.m, second.m) == (2, 3)
    assert first.l == 1 + e(-1)
    assert second.l == 1 + e(-3)
    assert first.o[0] == pytest.approx((10 * e(-1) + 20) / (1 + e(-1)), rel=1e-15)
    assert second.o[0] == pytest.approx((30 + 40 * e(-3)) / (1 + e(-3)), rel=1e-15)
    assert first.lse == pytest.approx(math.log(e(1) + e(2)), rel=1e-15)
    assert second.lse == pytest.approx(math.log(e(3) + e(0)), rel=1e-15)
    assert first.weight == pytest.approx((e(1) + e(2)) / (e(3) + 1), rel=1e-14)
    assert second.weight == 1
    exact = (10 * e(1) + 20 * e(2) + 30 * e(3) + 40) / (e(1) + e(2) + e(3) + 1)
    assert round(exact, 6) == 26.208871
    for o, lse in (worked.merged, worked.unsplit):
        assert o[0] == pytest.approx(exact, rel=1e-15)
        assert lse == pytest.approx(math.log(e(1) + e(2) + e(3) + 1), rel=1e-15)
    assert worked.plain_average[0] == pytest.approx(23.892422, abs=5e-7)
    # float32 with a handful of roundings
    for o, lse in (worked.kernel_merged, worked.kernel_unsplit):
        assert o[0] == pytest.approx(exact, rel=8 * 2**-24)
        assert lse == pytest.approx(worked.merged[1], rel=8 * 2**-24)
    for split, (o, lse) in zip(worked.splits, worked.kernel_splits, strict=True):
        assert o[0] == pytest.approx(split.o[0], rel=8 * 2**-24)
        assert lse == pytest.approx(split.lse, rel=8 * 2**-24)


def test_empty_split(xp):
    rng = np.random.default_rng(3)
    worked = trace.trace(rng.standard_normal(37), rng.standard_normal((37, 3)), 16, 4, device(xp))
    assert [split.pages for split in worked.splits] == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert [split.tokens for split in worked.splits] == [(0, 16), (16, 32), (32, 37), (37, 37)]
    empty = worked.splits[3]
    assert (empty.m, empty.l, empty.lse, empty.weight) == (-math.inf, 0, -math.inf, 0)
    assert not empty.o.any()
    o, lse = worked.kernel_splits[3]
    assert not o.any()
    assert lse == -math.inf
    np.testing.assert_allclose(worked.merged[0], worked.unsplit[0], rtol=1e-14)
    np.testing.assert_allclose(worked.kernel_merged[0], worked.unsplit[0], rtol=0, atol=37 * 2**-24)


@pytest.mark.parametrize("scores", [[], [-math.inf, -math.inf]])
def test_nothing_to_see(scores):
    worked = trace.trace(np.array(scores), np.ones((len(scores), 1)), 1, 2)
    for o, lse in (worked.merged, worked.unsplit, worked.kernel_merged, worked.kernel_unsplit):
        assert (o.tolist(), lse) == ([0], -math.inf)


def test_text(capsys):
    assert main(["trace", "--scores", "1,2,3,0", "--values", "10,20,30,40", "--num-splits", "2", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for line in (
        "split 0: pages [0, 2), tokens [0, 2)",
        "  p   = exp(s - m) = 0.367879, 1, so l = 1.36788",
        "  o   = (0.367879 x 10 + 1 x 20) / 1.36788 = 17.3106",
        "  lse = m + log(l) = 3 + 0.0485874 = 3.04859",
        "  o   = (0.479349 x 17.3106 + 1 x 30.4743) / 1.47935 = 26.208871",
        "  plain average of the o: wrong  o = 23.892422",
    ):
        assert line in text.splitlines()


def test_text_of_random_tokens(capsys):
    arguments = "trace --context-len 37 --page-size 16 --num-splits 4 --device cpu --seed"
    assert main([*arguments.split(), "5"]) == 0
    text = capsys.readouterr().out
    assert "split 3: pages [3, 3), tokens [37, 37)" in text
    assert "nothing to see: o = 0 and lse = -inf" in text
    main([*arguments.split(), "5"])
    assert capsys.readouterr().out == text
    main([*arguments.split(), "6"])
    assert capsys.readouterr().out != text


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--scores 1,2",
        "--scores 1,2 --values 1",
        "--context-len 3 --scores 1 --values 1",
        "--context-len -1",
        "--context-len 3 --page-size 0",
        "--context-len 3 --num-splits 0",
    ],
)
def test_options_that_do_not_fit(capsys, arguments):
    assert main(["trace", "--device", "cpu", *arguments.split()]) == 2
    assert "expected" in capsys.readouterr().err
