"""The 16-bit types of the CPU stand-in, against NumPy and ml_dtypes, bit by bit. NumPy only."""

import ml_dtypes
import numpy as np
import pytest
from helpers import launch

KERNELS = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void widen(const unsigned short* x, float* half, float* bfloat, const int* n) {
    for (int i = threadIdx.x; i < *n; i += blockDim.x) {
        half[i] = __half2float(__ushort_as_half(x[i]));
        bfloat[i] = __bfloat162float(__ushort_as_bfloat16(x[i]));
    }
}
extern "C" __global__ void narrow(const float* x, unsigned short* half, unsigned short* bfloat, const int* n) {
    for (int i = threadIdx.x; i < *n; i += blockDim.x) {
        half[i] = __half_as_ushort(__float2half_rn(x[i]));
        bfloat[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
    }
}
"""
# The hardware's instruction where the compiler targets it, and the software that takes its place elsewhere.
every_path = pytest.mark.parametrize("defines", [(), ("-mno-f16c",)], ids=["as built", "software"])
EVERY_16_BITS = np.arange(1 << 16, dtype=np.uint16)


def run(name, x, defines, out_dtype):
    half, bfloat = np.zeros(len(x), out_dtype), np.zeros(len(x), out_dtype)
    assert launch(KERNELS, name, 32, x, half, bfloat, np.array([len(x)], np.int32), defines=defines) == 0
    return half, bfloat


def same(got, want):
    """The same bits, NaN being NaN whatever its payload."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    unsigned = f"u{got.itemsize}"
    np.testing.assert_array_equal(got.view(unsigned)[~nan], want.view(unsigned)[~nan])


@every_path
def test_widening_is_exact_for_all_bits(defines):
    half, bfloat = run("widen", EVERY_16_BITS, defines, np.float32)
    same(half, EVERY_16_BITS.view(np.float16).astype(np.float32))
    same(bfloat, EVERY_16_BITS.view(ml_dtypes.bfloat16).astype(np.float32))


def around(dtype):
    """Every finite number of the type, and between it and the next one the middle and the float32 on either side of that."""
    numbers = EVERY_16_BITS.view(dtype)
    with np.errstate(invalid="ignore"):
        numbers = np.unique(numbers[np.isfinite(numbers)].astype(np.float64))
    middles = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    beyond = np.float32(2 * numbers[-1] - numbers[-2] if dtype == np.float16 else np.inf)
    return np.concatenate(
        [
            numbers.astype(np.float32),
            *(np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)),
            middles,
            [beyond, -beyond],
        ]
    )


@every_path
def test_narrowing_rounds_to_nearest_even(defines):
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 1 << 32, 2_000_000, dtype=np.uint32).view(np.float32)
    # where float16 is normal, subnormal, and just out of range at either end
    in_range = (rng.choice([-1, 1], 1_000_000) * 2.0 ** rng.uniform(-27, 17, 1_000_000)).astype(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 65504, 65519.996, 65520, 2**-24, 2**-25, 3e38], np.float32)
    x = np.concatenate([any_bits, in_range, special, around(np.float16), around(ml_dtypes.bfloat16)])
    half, bfloat = run("narrow", x, defines, np.uint16)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        same(half.view(np.float16), x.astype(np.float16))
        same(bfloat.view(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16))


def test_ties_go_to_even():
    # by hand: 1 + half an ulp falls to 1, 1 + 3 halves rises to 1 + 2 ulp
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    half, bfloat = run("narrow", x, (), np.uint16)
    assert list(half.view(np.float16)[:2].astype(float)) == [1, 1 + 2**-9]
    assert list(bfloat.view(ml_dtypes.bfloat16)[2:].astype(float)) == [1, 1 + 2**-6]
