"""The ladder: partial states, their merge and the whole decode, each against the reference's float64 and nothing else."""

import types

import numpy as np
import pytest
from decode_cases import CASES, VIEWS
from helpers import (
    DTYPES,
    U32,
    Guarded,
    assert_empty,
    assert_same_bits,
    assert_within,
    bits,
    decode,
    decode_bound,
    every_kernel,
    merge_bound,
    move,
    on,
    paged,
    stored,
    to_numpy,
)

import reference
from cupy_kernels import jit, merge_states, paged_decode, split_decode
from reference import Precision

F64 = Precision.uniform("float64")


def every(cases):
    """Cases by all kernels that take them."""
    name = lambda case, readable: f"{case.dtype}-{case.head_dim}-{case.view}{'-readable' if readable else ''}"
    both = [(case, readable) for case in cases for readable in case.kernels]
    return pytest.mark.parametrize(("case", "readable"), both, ids=[name(*pair) for pair in both])


def natural(lse, base):
    """The lse a call returned, as a natural logarithm in float64."""
    return to_numpy(lse).astype(np.float64) * (np.log(2) if base == "2" else 1)


def test_views_are_views():
    for name, view in VIEWS.items():
        plain = paged((37, 0))
        args = view(plain)
        for array, want in zip(args.values(), plain.values(), strict=True):
            np.testing.assert_array_equal(array.astype(np.float64), want.astype(np.float64))
        assert (name == "plain") == all(array.flags.c_contiguous for array in args.values())
        # and stay so on their way to a device
        device = types.SimpleNamespace(asarray=np.array, lib=np.lib)
        for array in args.values():
            moved = move(device, array)
            assert not np.shares_memory(moved, array)
            assert moved.strides == array.strides
            np.testing.assert_array_equal(bits(moved), bits(array))


@every(case for case in CASES if case.splits != 0)
def test_partial(xp, case, readable):
    args = case.inputs()
    stored = {"lse_base": case.lse_base, "partial_dtype": case.partial_dtype}
    with jit.settings(readable=readable):
        o, lse = decode(xp, args, split_decode, **case.schedule, **case.options, **stored)
    assert o.dtype == DTYPES[case.partial_dtype]
    assert lse.dtype == np.float32
    wanted = {name: value for name, value in case.schedule.items() if name != "schedule"}
    want_o, want_lse = reference.partial(**args, **wanted, **case.options, precision=F64)
    # "fixed" has the splits of the table's width: those that no request reaches are empty.
    splits = want_o.shape[2]
    assert_empty((o[:, :, splits:], lse[:, :, splits:]))
    lse = natural(lse, case.lse_base)
    # The bound of a whole request holds for each of its splits by itself, taken as a request.
    ranges = [
        [(i * -case.splits, (i + 1) * -case.splits) for i in range(splits)]
        if case.splits < 0
        else reference.split_ranges(n, case.page_size, splits)
        for n in case.lens
    ]
    for s in range(splits):
        part = dict(args)
        begins = [ranges[b][s][0] * case.page_size for b in range(len(case.lens))]
        ends = [min(n, ranges[b][s][1] * case.page_size) for b, n in enumerate(case.lens)]
        part["context_lens"] = np.array([max(0, end - begin) for begin, end in zip(begins, ends, strict=True)], np.int32)
        part["page_table"] = np.stack(
            [np.roll(row, -(begin // case.page_size)) for row, begin in zip(args["page_table"], begins, strict=True)]
        )
        e_o, e_lse = decode_bound(part, want_o[:, :, s], want_lse[:, :, s], out_dtype=case.partial_dtype, **case.options)
        assert_within(o[:, :, s], want_o[:, :, s], e_o, f"o of split {s}")
        assert_within(lse[:, :, s], want_lse[:, :, s], e_lse, f"lse of split {s}")


@every(CASES)
def test_whole(xp, case, readable):
    args = case.inputs()
    stored = {"lse_base": case.lse_base, "out_dtype": case.out_dtype, "partial_dtype": case.partial_dtype}
    with jit.settings(readable=readable):
        out, lse = decode(xp, args, **case.schedule, **case.options, **stored)
    assert out.dtype == DTYPES[case.out_dtype]
    assert lse.dtype == np.float32
    want, want_lse = reference.paged_decode(**args, **case.options)
    splits = len(args["page_table"][0]) if case.splits == 0 else case.splits
    splits = -(-args["page_table"].shape[1] // -splits) if splits < 0 else splits
    e_o, e_lse = decode_bound(
        args, want, want_lse, num_splits=splits, out_dtype=case.out_dtype, partial_dtype=case.partial_dtype, **case.options
    )
    assert_within(out, want, e_o, "out")
    assert_within(natural(lse, case.lse_base), want_lse, e_lse, "lse")


@pytest.mark.parametrize("algorithm", ["max_first", "online"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(a, b) for a in DTYPES for b in DTYPES])
def test_merge(xp, algorithm, dtype, out_dtype):
    rng = np.random.default_rng(7)
    for num_states, head_dim in ((1, 64), (2, 1), (5, 200), (64, 33)):
        o = rng.standard_normal((3, 4, num_states, head_dim)).astype(DTYPES[dtype])
        lse = (10 * rng.standard_normal((3, 4, num_states))).astype(np.float32)
        lse[1, :, ::2] = -np.inf
        lse[2, 1] = -np.inf
        lse[2, 2] += 300
        o[lse == -np.inf] = np.nan
        got = merge_states(move(xp, o), move(xp, lse), out_dtype=out_dtype, algorithm=algorithm)
        assert got[0].dtype == DTYPES[out_dtype]
        want = reference.merge(o, lse, precision=F64, algorithm=algorithm)
        e_o, e_lse = merge_bound(o, lse, *want, out_dtype=out_dtype)
        assert_within(got[0], want[0], e_o, f"o of {num_states} states")
        assert_within(got[1], want[1], e_lse, f"lse of {num_states} states")


@pytest.mark.parametrize("num_splits", [1, 3])
@every_kernel
def test_outputs_given_by_the_caller(xp, num_splits, head_dim):
    args = paged((37, 0, 100), num_q_heads=6, head_dim=head_dim)
    plain = decode(xp, args, num_splits=num_splits)
    out, lse = Guarded(xp, plain[0].shape, "float16"), Guarded(xp, plain[1].shape)
    got = paged_decode(**on(xp, args), num_splits=num_splits, out=out.view, lse_out=lse.view)
    assert got[0] is out.view
    assert got[1] is lse.view
    parts = decode(xp, args, split_decode, num_splits=num_splits)
    o_part, lse_part = Guarded(xp, parts[0].shape), Guarded(xp, parts[1].shape)
    split_decode(**on(xp, args), num_splits=num_splits, out=o_part.view, lse_out=lse_part.view)
    for guarded, want in ((out, plain[0]), (lse, plain[1]), (o_part, parts[0]), (lse_part, parts[1])):
        np.testing.assert_array_equal(to_numpy(guarded.view), want)
        guarded.assert_outside_untouched()


class Foreign:
    """An array of another library: it speaks DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@every_kernel
def test_arrays_that_speak_dlpack_are_taken_as_they_lie(xp, head_dim):
    args = on(xp, paged((37, 0, 100), num_q_heads=6, head_dim=head_dim))
    want = paged_decode(**args, num_splits=3)
    out = xp.full(want[0].shape, xp.nan, xp.float16)
    got = paged_decode(**{name: Foreign(array) for name, array in args.items()}, num_splits=3, out=Foreign(out))
    assert isinstance(got[0], xp.ndarray)
    assert_same_bits(tuple(map(to_numpy, (*got, out))), tuple(map(to_numpy, (*want, want[0]))))


def test_default_options_are_what_they_say(xp):
    args = paged((300, 37), num_q_heads=4, num_kv_heads=2, head_dim=64)
    out, lse = decode(xp, args)
    assert out.dtype == np.float16
    want, want_lse = reference.paged_decode(**args, sm_scale=1 / 8)
    e_o, e_lse = decode_bound(args, want, want_lse, num_splits=8, out_dtype="float16")
    assert_within(out, want, e_o)
    assert_within(lse, want_lse, e_lse)


def test_one_page_of_two_requests(xp):
    # a shared prefix: the second request reads the first one's pages
    args = paged((48, 48), page_size=16, dtype="float32")
    args["page_table"][1, :2] = args["page_table"][0, :2]
    want, want_lse = reference.paged_decode(**args)
    e_o, e_lse = decode_bound(args, want, want_lse, num_splits=3)
    out, lse = decode(xp, args, num_splits=3)
    assert_within(out, want, e_o)
    assert_within(lse, want_lse, e_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_store_rounds_to_nearest(xp, dtype):
    # One token: out is its v, or v between two numbers of the output's dtype. A truncating store is off by up to 2 U.
    args = paged((1,), head_dim=256, dtype="float32", num_q_heads=1, num_kv_heads=1)
    page = args["page_table"][0, 0]
    v = args["v_cache"][page, 0, 0] = np.linspace(-3, 3, 256, dtype=np.float32)
    out, lse = decode(xp, args, num_splits=1, out_dtype=dtype)
    np.testing.assert_array_equal(out[0, 0], v.astype(DTYPES[dtype]))
    assert np.all(np.abs(out[0, 0].astype(np.float64) - v) <= stored(v, dtype))
    s = args["q"][0, 0].astype(np.float64) @ args["k_cache"][page, 0, 0] / 16
    size = np.abs(args["q"][0, 0].astype(np.float64)) @ np.abs(args["k_cache"][page, 0, 0]) / 16
    # A dot in chunks of 8, its scale, and the change of base: 8 + 32 + 8 roundings.
    assert abs(lse[0, 0] - s) <= 48 * U32 * size
