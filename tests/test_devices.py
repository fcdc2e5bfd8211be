"""Arrays decide where a call runs: on a GPU that is not the current one, and states that meet from two GPUs."""

import numpy as np
import pytest
from helpers import assert_same_bits, on, paged, to_numpy

from cupy_kernels import DecodePlan, merge_state, merge_state_in_place, merge_states, paged_decode, split_decode

pytestmark = pytest.mark.gpu
OPTIONS = [{}, {"num_splits": 1}, {"num_splits": 3}, {"pages_per_split": 2}]


@pytest.fixture
def cupy():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    return cupy


def call(cupy, device, **options):
    """The same arguments on any device."""
    with cupy.cuda.Device(device):
        return on(cupy, paged((100, 0, 37), num_q_heads=4, num_kv_heads=2, head_dim=64, **options))


def host(arrays):
    return tuple(map(to_numpy, arrays))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_call_runs_where_its_arrays_are(cupy, options, dtype):
    here, there = call(cupy, 0, dtype=dtype), call(cupy, 1, dtype=dtype)
    with cupy.cuda.Device(0):
        want, got = paged_decode(**here, **options), paged_decode(**there, **options)
        plan = DecodePlan(**there, **options)
        planned = plan.run(**there)
    assert {x.device.id for x in (*got, *planned)} == {1}
    assert_same_bits(host(got), host(want))
    assert_same_bits(host(planned), host(want))


def test_arrays_on_two_devices_are_refused(cupy):
    here, there = call(cupy, 0), call(cupy, 1)
    with pytest.raises(ValueError, match=r"^k_cache: expected device 0, got device 1"):
        paged_decode(**here | {"k_cache": there["k_cache"]})


def test_states_of_two_devices_merge(cupy):
    """Each device has seen every other split; their states, brought together, are the whole."""
    o, lse = split_decode(**call(cupy, 0), num_splits=4)
    want = host(merge_states(o, lse))
    with cupy.cuda.Device(1):
        o_there, lse_there = cupy.asarray(to_numpy(o)), cupy.asarray(to_numpy(lse))
    with cupy.cuda.Device(0):
        here, there = merge_states(o[:, :, ::2], lse[:, :, ::2]), merge_states(o_there[:, :, 1::2], lse_there[:, :, 1::2])
        assert {x.device.id for x in there} == {1}
        brought = tuple(cupy.asarray(to_numpy(x)) for x in there)
        merged = merge_state(*here, *brought)
        merge_state_in_place(*here, *brought)
    assert_same_bits(host(here), host(merged))
    # Two merges instead of one: each rounds o and lse once more, in float32.
    assert np.max(np.abs(to_numpy(merged[0]) - want[0])) <= 8 * 2.0**-24 * np.max(np.abs(to_numpy(o)))
    assert_same_bits(np.isneginf(to_numpy(merged[1])), np.isneginf(want[1]))
