"""DecodePlan: the same bits as paged_decode from other arrays, refusals, host time, CUDA graphs."""

import numpy as np
import pytest
from helpers import assert_same_bits, on, paged, to_numpy

from cupy_kernels import DecodePlan, paged_decode

OPTIONS = [{}, {"num_splits": 1}, {"num_splits": 3}, {"pages_per_split": 2}, {"num_splits": 3, "partial_dtype": "float16"},
           {"lse_base": "2", "out_dtype": "float32"}]  # fmt: skip
SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "extra_entries": 2}


def full(xp, **options):
    """Arguments whose table holds 112 tokens a request, all pages in it real, so that any length in it can be asked for."""
    args = paged((112, 112, 112), **(SHAPE | options))
    args["page_table"] = args["page_table"][:, :7].copy()
    return on(xp, args)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_bits_as_paged_decode(xp, options, dtype):
    plan = DecodePlan(**full(xp, dtype=dtype), **options)
    for seed, lens in enumerate(([112, 0, 37], [0, 0, 0], [1, 112, 16], [112, 0, 37])):
        args = full(xp, dtype=dtype, seed=seed) | {"context_lens": xp.asarray(np.array(lens, np.int32))}
        assert_same_bits(tuple(map(to_numpy, plan.run(**args))), tuple(map(to_numpy, paged_decode(**args, **options))))


def test_outputs_given_are_written_and_returned(xp):
    args = full(xp)
    plan, want = DecodePlan(**args), paged_decode(**args)
    out, lse = xp.full((3, 4, 64), np.nan, np.float16), xp.full((3, 4), np.nan, np.float32)
    got = plan.run(**args, out=out, lse_out=lse)
    assert got[0] is out
    assert got[1] is lse
    assert_same_bits((to_numpy(out), to_numpy(lse)), tuple(map(to_numpy, want)))


def test_strided_outputs_as_planned(xp):
    args = full(xp)
    wide = xp.full((3, 8, 64), np.nan, np.float16)
    plan = DecodePlan(**args, out=wide[:, ::2])
    plan.run(**args, out=wide[:, ::2])
    assert_same_bits(to_numpy(wide)[:, ::2], to_numpy(paged_decode(**args)[0]))
    assert np.isnan(to_numpy(wide)[:, 1::2]).all()
    with pytest.raises(ValueError, match="out: expected strides"):
        plan.run(**args, out=xp.empty((3, 4, 64), np.float16))


def test_lengths_beyond_the_table_count_as_all_of_it(xp):
    args = full(xp)
    plan = DecodePlan(**args)
    beyond = args | {"context_lens": xp.asarray(np.array([113, 2**31 - 1, -5], np.int32))}
    within = args | {"context_lens": xp.asarray(np.array([112, 112, 0], np.int32))}
    assert_same_bits(tuple(map(to_numpy, plan.run(**beyond))), tuple(map(to_numpy, plan.run(**within))))


def test_an_empty_batch(xp):
    args = on(xp, paged((), **SHAPE))
    out, lse = DecodePlan(**args).run(**args)
    assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))


def cut(xp, array):
    return array[..., :-1] if array.ndim > 1 else array[:-1]


def respaced(xp, array):
    if array.ndim == 1:
        return xp.repeat(array, 2)[::2]
    return xp.zeros((*array.shape[:-1], 2, array.shape[-1]), array.dtype)[..., 0, :]


def shifted(xp, array):
    flat = xp.zeros(array.size + 1, array.dtype)
    return flat[1:].reshape(array.shape)


WIDE, NARROW = ("q", "k_cache", "v_cache"), ("page_table", "context_lens")
BAD = [
    (WIDE, lambda xp, x: x.astype(np.float64), TypeError, "expected dtype float16 as planned, got float64"),
    (NARROW, lambda xp, x: x.astype(np.int64), TypeError, "expected dtype int32 as planned, got int64"),
    (WIDE + NARROW, cut, ValueError, "expected shape"),
    (WIDE + NARROW, lambda xp, x: x.reshape(1, *x.shape), ValueError, "expected shape"),
    (WIDE + NARROW, respaced, ValueError, "expected strides"),
    (WIDE, lambda xp, x: xp.asfortranarray(x), ValueError, "expected strides"),
    (WIDE, shifted, ValueError, "expected memory aligned to 16 bytes as planned"),
    (WIDE + NARROW, lambda xp, x: x.tolist(), TypeError, "expected a NumPy, CuPy or DLPack array, got list"),
]
STRIDED = {"all contiguous": False, "one is not": True}


@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize(("name", "change", "error", "text"), [(n, *rest) for names, *rest in BAD for n in names])
def test_refuses_what_it_was_not_planned_for(xp, name, change, error, text, strided):
    args = full(xp)
    out, lse = xp.full((3, 4, 64), 7, np.float16), xp.full((3, 8 if strided else 4), 7, np.float32)
    lse = lse[:, ::2] if strided else lse
    plan = DecodePlan(**args, lse_out=lse)
    with pytest.raises(error, match=f"^{name}: {text}"):
        plan.run(**args | {name: change(xp, args[name])}, out=out, lse_out=lse)
    assert (out == 7).all()
    assert (lse == 7).all()
    want = paged_decode(**args)
    assert_same_bits(tuple(map(to_numpy, plan.run(**args, out=out, lse_out=lse))), tuple(map(to_numpy, want)))


@pytest.mark.gpu
def test_refuses_arrays_of_the_cpu_and_arrays_that_were_reshaped():
    import cupy

    args = full(cupy)
    plan = DecodePlan(**args)
    plan.run(**args)
    with pytest.raises(TypeError, match=r"^q: expected a cupy array as planned, got numpy's"):
        plan.run(**args | {"q": to_numpy(args["q"])})
    with pytest.raises(TypeError, match=r"^q: expected a numpy array as planned, got cupy's"):
        DecodePlan(**full(np)).run(**args)
    args["page_table"].shape = (7, 3)
    with pytest.raises(ValueError, match=r"^page_table: expected shape \[3, 7\] as planned, got \[7, 3\]"):
        plan.run(**args)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"num_splits": 3}], ids=str)
def test_a_captured_graph_follows_lengths_and_tables(options):
    import cupy

    args = full(cupy)
    plan = DecodePlan(**args, **options)
    out, lse = cupy.empty((3, 4, 64), np.float16), cupy.empty((3, 4), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        plan.run(**args, out=out, lse_out=lse)
        stream.begin_capture()
        plan.run(**args, out=out, lse_out=lse)
        graph = stream.end_capture()
    rng = np.random.default_rng(0)
    for lens in ([112, 112, 112], [1, 0, 37], [0, 0, 0], [0, 0, 0], [16, 17, 112]):
        with stream:
            args["context_lens"][...] = cupy.asarray(np.array(lens, np.int32))
            args["page_table"][...] = cupy.asarray(rng.permutation(21).reshape(3, 7).astype(np.int32))
            out.fill(np.nan), lse.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            assert_same_bits((to_numpy(out), to_numpy(lse)), tuple(map(to_numpy, paged_decode(**args, **options))))


@pytest.mark.gpu
def test_two_plans_on_two_streams():
    import cupy

    calls = [full(cupy, seed=seed) for seed in range(2)]
    want = [tuple(map(to_numpy, paged_decode(**args))) for args in calls]
    plans, streams = [DecodePlan(**args) for args in calls], [cupy.cuda.Stream(non_blocking=True) for _ in calls]
    cupy.cuda.Device().synchronize()
    got = []
    for _ in range(20):
        for plan, stream, args in zip(plans, streams, calls, strict=True):
            with stream:
                got.append(plan.run(**args))
    cupy.cuda.Device().synchronize()
    for i, result in enumerate(got):
        assert_same_bits(tuple(map(to_numpy, result)), want[i % 2])
