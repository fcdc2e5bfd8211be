"""The comparator in anyone's test, the ratchet, and what other projects' tolerances see."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import planted_faults as planted
import pytest
from planted_faults import CASE, SIMT, decode

import reference
from verify import TIERS, assert_attention, build, ratchet
from verify.peers import peers


@pytest.fixture(scope="module")
def good():
    inputs = build(CASE)
    return inputs, decode(inputs)


def test_ratchet(tmp_path):
    path = tmp_path / "ratchet.json"
    assert ratchet.load(path) == {}
    measures = {"ratio": 0.2, "rho": 1.0, "inexact": 0.001}
    assert ratchet.check({}, "cpu", "a", measures).verdict == "n/a"
    ratchet.renew("cpu", {"a": measures}, path)
    ratchet.renew("cpu", {"b": measures}, path)
    records = ratchet.load(path)
    assert set(records["cpu"]) == {"a", "b"}
    changes = [
        ({"ratio": 0.25}, "pass"),
        ({"ratio": 0.26}, "fail"),
        ({"ratio": 0.0}, "pass"),
        ({"rho": 1.3}, "fail"),
        ({"rho": np.nan}, "fail"),
        ({"inexact": 0.01}, "pass"),
        ({"inexact": 0.02}, "fail"),
    ]
    for grown, verdict in changes:
        result = ratchet.check(records, "cpu", "a", {**measures, **grown})
        assert result.verdict == verdict, (grown, result)
    # A measure that is gone is not a measure that is good.
    assert ratchet.check(records, "cpu", "a", {"ratio": 0.2}).verdict == "fail"
    assert ratchet.check(records, "gpu", "a", measures).verdict == "n/a"


def test_peers_see_less(good):
    inputs, (out, _, *_) = good
    want, _ = reference.paged_decode(**inputs.call())
    assert all(peers(out, want, inputs).values())
    worse, _, *_ = planted.one_rounding_too_many(inputs)
    assert peers(worse, want)["allclose 1e-2"]
    bad = out.copy()
    bad[1, 0, 0] = np.nan
    assert not any(peers(bad, want, inputs).values())


ARRAYS = ("q", "k_cache", "v_cache", "page_table", "context_lens")


def arguments(inputs):
    return {**{name: getattr(inputs, name) for name in ARRAYS}, "sm_scale": inputs.sm_scale, "layout": inputs.layout}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_assert_attention(dtype, layout):
    inputs = build(replace(CASE, dtype=dtype, layout=layout))
    a = replace(SIMT, out_dtype=dtype)
    out, lse, o_part, lse_part = decode(inputs, a)
    # Nothing known of the kernel: the loosest bound; all known: the tightest.
    loose = assert_attention(out, **arguments(inputs))
    tight = assert_attention(
        out, **arguments(inputs), lse=lse, partial=(o_part, lse_part), arithmetic=a, num_splits=4, tier=["T0", "T1", "T2", "T6"]
    )
    assert loose.verdicts["T1"].ratio <= tight.verdicts["T1"].ratio <= 1
    assert set(loose.verdicts) == {"T1", "T7"}
    assert set(tight.verdicts) == {"T0", "T1", "T2", "T5", "T6", "T7"}
    out = out.copy()
    out[2, 0, 0] = np.nan
    with pytest.raises(AssertionError, match=r"(?s)T1  fail.*at \[2, 0, 0\]: got nan, want .*T7  fail"):
        assert_attention(out, **arguments(inputs))


@pytest.mark.parametrize("fault", [planted.wrong_page, planted.swapped_heads, planted.dropped_token, planted.v_is_k])
def test_assert_attention_rejects_without_knowing_the_kernel(good, fault):
    out, *_ = fault(good[0])
    with pytest.raises(AssertionError, match="attention is wrong:\nT1  fail"):
        assert_attention(out, **arguments(good[0]))


def test_assert_attention_takes_what_others_hold(good):
    inputs, (out, lse, *_) = good

    class OnDevice:
        def __init__(self, x):
            self.x = x

        def get(self):
            return self.x

    held = {name: OnDevice(value) if name in ARRAYS else value for name, value in arguments(inputs).items()}
    assert assert_attention(OnDevice(out), **held, lse=OnDevice(lse), tier="T2").passed
    for tier in ("T8", "t1"):
        with pytest.raises(ValueError, match=r"^tier: expected names among"):
            assert_attention(out, **held, tier=tier)
    assert set(TIERS) == {"T0", "T0b", "T1", "T2", "T3", "T3b", "T4", "T5", "T6", "T7", "T8", "T9"}


def test_bfloat16_out_of_float16_inputs(good):
    inputs, _ = good
    a = replace(SIMT, out_dtype="bfloat16")
    out, lse, *_ = decode(inputs, a)
    assert out.dtype == ml_dtypes.bfloat16
    assert assert_attention(out, **arguments(inputs), lse=lse).passed
