"""The comparator accepts the correct result, rejects planted faults, and says where and why."""

import json
from dataclasses import replace

import numpy as np
import planted_faults as planted
import pytest
from planted_faults import CASE, SIMT, decode

import reference
from verify import Case, bitwise, build, compare, decode_budget, partial_budget
from verify.arithmetic import DTYPES
from verify.lists import LISTS
from verify.tiers import sigma_limit


def judge(inputs, out, lse, a=SIMT, partial=None, **options):
    budget = decode_budget(inputs, a, num_splits=4)
    states = None if partial is None else (*partial, partial_budget(inputs, a, num_splits=4))
    want = reference.paged_decode(**inputs.call())
    return compare(out, lse, budget, a, inputs=inputs, reference=want, partial=states, **options)


def failed(report):
    return {name for name, v in report.verdicts.items() if v.verdict == "fail"}


@pytest.fixture(scope="module")
def good():
    inputs = build(CASE)
    return inputs, decode(inputs)


def test_correct_is_accepted(good):
    inputs, (out, lse, *partial) = good
    report = judge(inputs, out, lse, partial=partial)
    assert report.passed, str(report)
    assert list(report.verdicts) == ["T0", "T1", "T2", "T3", "T3b", "T4", "T5", "T6", "T7"]
    assert 0 < report.verdicts["T1"].ratio <= 1
    assert report.verdicts["T2"].ratio >= report.verdicts["T1"].ratio


@pytest.mark.parametrize(
    "case", [*LISTS["smoke"], *[c for c in LISTS["edge"] if c.name.startswith("edge-")]], ids=lambda c: c.name
)
def test_correctly_rounded_reference_is_accepted(case):
    inputs = build(case)
    out, lse = reference.paged_decode(**inputs.call())
    a = replace(SIMT, out_dtype=case.output_dtype)
    with np.errstate(invalid="ignore"):
        out = out.astype(DTYPES[case.output_dtype])
    report = compare(out, lse.astype(np.float32), decode_budget(inputs, a, **case.splits()), a, inputs=inputs, family=case.family)
    assert report.passed, f"{case}\n{report}"


FAULTS = [
    (planted.wrong_page, {"T1", "T2", "T5"}),
    (planted.swapped_heads, {"T1", "T2", "T5"}),
    (planted.wrong_kv_head, {"T1", "T2", "T5"}),
    (planted.dropped_token, {"T1", "T2", "T5"}),
    (planted.v_is_k, {"T1", "T2"}),
    (planted.one_nan, {"T1", "T2", "T7"}),
    (planted.one_rounding_too_many, {"T1", "T2"}),
    (planted.truncated_output, {"T1", "T2"}),
    (planted.plain_average, {"T1", "T2"}),
    (planted.lse_without_maximum, {"T5"}),
    (planted.empty_by_a_sentinel, {"T5", "T7"}),
    (planted.empty_row_unwritten, {"T1", "T2"}),
    (planted.minus_zero_for_empty, {"T1", "T2"}),
]


@pytest.mark.parametrize(("fault", "tiers"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_planted_fault_is_rejected(good, fault, tiers):
    out, lse, *_ = fault(good[0])
    report = judge(good[0], out, lse)
    assert tiers <= failed(report), str(report)


def test_partial_states(good):
    inputs, (out, lse, o_part, lse_part) = good
    for fault in ("o", "lse", "empty"):
        o, l = o_part.copy(), lse_part.copy()
        if fault == "o":
            o[2, 1, 3, 5] *= 1 + 2.0**-14
        elif fault == "lse":
            l[2, 1, 3] += 1e-4
        else:
            o[1, 0, 3, 0] = 1
        report = judge(inputs, out, lse, partial=(o, l))
        assert failed(report) == {"T6"}, str(report)
        assert report.verdicts["T6"].worst.index[:3] == ((1, 0, 3) if fault == "empty" else (2, 1, 3))


def test_lse_in_base_2(good):
    inputs, (out, lse, *_) = good
    base_2 = (lse.astype(np.float64) / np.log(2)).astype(np.float32)
    assert judge(inputs, out, base_2, lse_base="2").passed
    assert failed(judge(inputs, out, base_2)) == {"T5"}


@pytest.mark.parametrize("family", ["nan_q", "nan_k", "nan_v", "inf_v"])
def test_non_finite_sets(family):
    inputs = build(Case("c", family=family, context_lens=(40, 1)))
    out, lse = reference.paged_decode(**inputs.call())
    out, lse = out.astype(np.float16), lse.astype(np.float32)
    assert judge(inputs, out, lse).passed
    # Which non-finite value it is may differ: inf under a weight of 0 is NaN.
    assert judge(inputs, np.where(np.isfinite(out), out, np.float16(np.nan)), lse).passed
    laundered = np.where(np.isfinite(out), out, np.float16(0))
    assert {"T1", "T2", "T7"} <= failed(judge(inputs, laundered, lse))
    if np.isnan(lse).any():
        empty = np.where(np.isnan(lse), np.float32(-np.inf), lse)
        assert {"T5", "T7"} <= failed(judge(inputs, out, empty))


def test_exact_tier():
    for family in ("equal", "gqa_id", "const_v", "token_id"):
        inputs = build(Case("c", family=family, context_lens=(0, 37, 1)))
        out, lse, *_ = decode(inputs)
        report = judge(inputs, out, lse)
        assert report.passed, str(report)
        assert report.verdicts["T0"].verdict == "pass"
        out[1, 0, 3] = np.nextafter(out[1, 0, 3], np.float16(9))
        assert "T0" in failed(judge(inputs, out, lse))
    # One visible token: its V, in every family.
    inputs = build(Case("c", context_lens=(1, 9)))
    out, lse, *_ = decode(inputs)
    assert judge(inputs, out, lse).verdicts["T0"].verdict == "pass"
    out[0, 1, 1] = np.nextafter(out[0, 1, 1], np.float16(9))
    assert judge(inputs, out, lse).verdicts["T0"].worst.index == (0, 1, 1)


def test_bitwise():
    x = np.array([[0.0, np.nan, 1.0]], np.float16)
    l = np.zeros(1, np.float32)
    assert bitwise([(x, l)] * 20).verdict == "pass"
    for value in (-0.0, 5e-8):
        y = x.copy()
        y[0, 0] = value
        verdict = bitwise([(x, l), (x, l), (y, l)])
        assert (verdict.verdict, verdict.worst.index) == ("fail", (0, 0))
    with pytest.raises(ValueError, match=r"^results: expected at least 2"):
        bitwise([(x, l)])


@pytest.fixture(scope="module")
def many():
    """Enough normal outputs for the statistics: 65,536, by float64 with the roundings added that a test wants."""
    case = Case("many", context_lens=(128,) * 32, num_q_heads=16, num_kv_heads=4, head_dim=128)
    inputs = build(case)
    budgets = {
        stored: decode_budget(inputs, replace(SIMT, partial_dtype=stored), num_splits=4) for stored in ("float32", "float16")
    }
    o, l = reference.partial(**inputs.call(), num_splits=4, precision=reference.Precision.uniform("float64"))
    return budgets, o, np.exp(l - l.max(-1, keepdims=True))[..., None]


@pytest.mark.parametrize(
    ("stored", "described", "fails"),
    [("float64", "float32", set()), ("float16", "float32", {"T1", "T2", "T3", "T4"}), ("float16", "float16", set())],
)
def test_population_sees_an_extra_rounding(many, stored, described, fails):
    budgets, o, w = many
    out = ((w * o.astype(stored)).sum(-2) / w.sum(-2)).astype(np.float16)
    report = compare(out, None, budgets[described], replace(SIMT, partial_dtype=described), family="normal")
    assert failed(report) == fails, str(report)
    # Comparable splits of zero-mean values: one more rounding, rho = sqrt(2), within the 10 % of the predictor.
    assert abs(report.measures["rho"] / (1 if stored == "float64" else np.sqrt(2)) - 1) < 0.1


def test_population_sees_a_bias(many):
    budgets, o, w = many
    exact = (w * o).sum(-2) / w.sum(-2)
    down = exact.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    report = compare(down.view(np.float32).astype(np.float16), None, budgets["float32"], SIMT, family="normal")
    assert {"T1", "T2", "T3", "T3b", "T4"} <= failed(report)
    # Truncation: errors uniform in an ulp on one side, RMS twice that of rounding to nearest.
    assert abs(report.measures["rho"] - 2) < 0.1


def test_sigma_limit_is_below_the_bound(good):
    budget = decode_budget(good[0], SIMT, num_splits=4)
    assert (sigma_limit(budget, SIMT) <= budget.total).all()


def test_report(good):
    inputs, (out, lse, *_) = good
    out = out.copy()
    out[2, 3, 17] += np.float16(0.25)
    report = judge(inputs, out, lse)
    worst = report.verdicts["T1"].worst
    assert worst.index == (2, 3, 17)
    want = reference.paged_decode(**inputs.call())[0][2, 3, 17]
    text = str(report)
    for part in ("T1  fail", "[2, 3, 17]", f"{float(out[2, 3, 17]):.17g}", f"{want:.17g}", "out_round", "1 of 768 elements"):
        assert part in text
    assert next(iter(worst.budget)) == "out_round"
    written = json.loads(json.dumps(report.to_json()))
    assert written["verdict"] == "fail"
    assert written["tiers"]["T5"]["verdict"] == "pass"
    assert set(written["worst"]) == {"index", "got", "want", "budget"}


def test_refuses_other_arrays(good):
    inputs, (out, lse, *_) = good
    with pytest.raises(TypeError, match=r"^out: expected dtype float16, got float32"):
        judge(inputs, out.astype(np.float32), lse)
    with pytest.raises(ValueError, match=r"^lse: expected shape \[3, 4\]"):
        judge(inputs, out, lse[:, :2])
