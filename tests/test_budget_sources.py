"""The parts of the bound do what their formulas say, and the predictor of stored partials is right."""

import numpy as np
import pytest

from verify import (
    SOURCES,
    Arithmetic,
    Case,
    build,
    decode_budget,
    head_budget,
    partial_budget,
    predict_rho,
    tiled_order,
    token_splits,
)
from verify.arithmetic import DTYPES, U32


@pytest.mark.parametrize("partial_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["normal", "pos_v", "split_flip", "ramp_up", "cancel"])
def test_predictor_of_stored_o(family, partial_dtype):
    check_predictor(family, partial_dtype=partial_dtype)


@pytest.mark.parametrize("family", ["normal", "split_flip"])
def test_predictor_of_stored_lse(family):
    check_predictor(family, lse_dtype="float16")


def check_predictor(family, **stored):
    """Predicted against simulated RMS: exact float64 partials, stored and merged, so that nothing else adds."""
    a = Arithmetic(out_dtype="float16", **stored)
    # An lse is shared by a row, so its rounding is one draw a row and split: many rows make the RMS steady.
    lens, heads = ((256,) * 16, 16) if "lse_dtype" in stored else ((1024, 512), 4)
    case = Case("p", family=family, context_lens=lens, head_dim=64, num_q_heads=heads, num_kv_heads=heads, num_splits=8)
    inputs = build(case)
    budget, parts = decode_budget(inputs, a, num_splits=8), partial_budget(inputs, a, num_splits=8)
    o = parts.out.astype(DTYPES[a.partial_dtype]).astype(np.float64)
    lse = parts.lse.astype(DTYPES[a.lse_dtype]).astype(np.float64)
    w = np.exp(lse - lse.max(-1, keepdims=True))[..., None]
    out = ((w * o).sum(-2) / w.sum(-2)).astype(np.float16).astype(np.float64)
    ideal = budget.out.astype(np.float16).astype(np.float64)
    measured = np.sqrt(np.mean((out - budget.out) ** 2) / np.mean((ideal - budget.out) ** 2))
    predicted = predict_rho(budget, a)
    # Uniform, independent rounding errors: the claim is 10 %.
    assert abs(predicted / measured - 1) < 0.1, (predicted, measured)
    # The worst case over every source is above it.
    assert predict_rho(budget, a, everything=True) > predicted > 1


def test_sources_appear_with_their_cause():
    inputs = build(Case("c", family="ramp_up", context_lens=(300,)))

    def total(source, **fields):
        budget = decode_budget(inputs, Arithmetic(tile=16, l_sum="tree", out_dtype="float16", **fields), num_splits=4)
        return budget.terms[..., list(SOURCES).index(source)].max()

    assert total("o_store") == 0 < total("o_store", partial_dtype="float16") < total("o_store", partial_dtype="bfloat16")
    assert total("lse_store") == 0 < total("lse_store", lse_dtype="float16")
    assert total("p_round") == 0 < total("p_round", p="float16", l_from_p=True) < total("p_round", p="float16")
    assert total("p_round", p="bfloat16x3") < total("p_round", p="float16x2") < total("p_round", p="bfloat16x2")
    assert total("state_merge") == 0 < total("state_merge", states=2)
    assert total("merge_w") < total("merge_w", merge="online")
    assert total("norm") < total("norm", division=5.0)
    assert total("ex2", ex2=2.0) < total("ex2")
    assert total("pv_acc", pv="fma_tile") < total("pv_acc", pv="fma") <= total("pv_acc", pv="any")
    assert total("pv_acc", pv="mma_tile") < total("pv_acc", pv="mma")
    assert total("scale_const") < total("scale_const", constant=3.0)


def test_one_dominant_key_and_constant_v_leave_only_rounding():
    a = Arithmetic(tile=16, pv="fma_tile", l_sum="tree", out_dtype="float32")
    weights = ["qk_dot", "scale_const", "score_mul", "score_sub", "ex2", "rescale_w", "merge_w", "lse_calc"]
    for family in ("const_v", "token_id"):
        budget = decode_budget(build(Case("c", family=family, context_lens=(100,))), a, num_splits=4)
        index = [list(SOURCES).index(name) for name in weights]
        # What is common to all values cancels: only roundoff of float64 and e^-200 is left of the weights' errors.
        assert budget.terms[..., index].max() <= 1e-14


def test_fma_prefixes_by_hand():
    # Equal weights 1/2, v = 1 then -1: prefixes 1/2 and 0.
    budget = head_budget(
        np.zeros((1, 1)), np.zeros((2, 1)), np.array([[1.0], [-1.0]]), 1.0, Arithmetic(pv="fma", tile=2), [[[range(2)]]]
    )
    pv = budget.terms[0, 0, list(SOURCES).index("pv_acc")]
    # The second-order factor is all that may be on top.
    assert 0.5 * U32 <= pv <= 0.5 * U32 * (1 + 1e-5)


def test_long_context_in_chunks(monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 8)), rng.standard_normal((40_000, 8)), rng.standard_normal((40_000, 8))
    a = Arithmetic(tile=64, pv="fma_tile", l_sum="tree", out_dtype="float16")
    order = tiled_order(token_splits(40_000, 16, num_splits=3), 64)
    whole = head_budget(q, k, v, 0.3, a, order)
    monkeypatch.setattr("verify.accumulation.CHUNK", 5000)
    chunked = head_budget(q, k, v, 0.3, a, order)
    # Other partial sums of float64, so other roundoff.
    assert np.max(np.abs(whole.terms / np.where(chunked.terms == 0, 1, chunked.terms) - (chunked.terms != 0))) < 1e-9
