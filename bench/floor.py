"""The read floor: how long the device takes to read as many bytes in a straight line, doing nothing else."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from . import timing

THREADS = 256
# (blocks an SM, of them resident, loads in flight per thread). Eight loads of 16 bytes take 32 registers and an address: 8 blocks
# of such threads do not fit at once. So: 8 an SM in turns, as many as fit, and 8 at once with 4 loads. The best is the floor.
VARIANTS = ((8, 5, 8), (5, 5, 8), (8, 8, 4))
# One thread reads vectors t, t + T, t + 2T, ...; all T threads together walk the bytes from front to back.
SOURCE = r"""
static __device__ uint4 load(const uint4* address) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(address));
    return x;
}

extern "C" __global__ void __launch_bounds__(256, RESIDENT) read_floor(
    const uint4* data,  // [vectors], 16 bytes each
    unsigned vectors,  // below 2^31: 64-bit indices would spill
    unsigned* fold  // [1], never written in practice
) {
    const unsigned threads = gridDim.x * blockDim.x;
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned folded = 0;
    for (; i + (IN_FLIGHT - 1) * threads < vectors; i += IN_FLIGHT * threads) {
        uint4 x[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) x[k] = load(data + i + k * threads);
        // Last loaded, first folded: all loads are under way before one is waited for.
#pragma unroll
        for (int k = IN_FLIGHT - 1; k >= 0; --k) folded ^= x[k].x ^ x[k].y ^ x[k].z ^ x[k].w;
    }
#pragma unroll
    for (int k = 0; k < IN_FLIGHT - 1; ++k, i += threads) {
        if (i < vectors) {
            const uint4 x = load(data + i);
            folded ^= x.x ^ x.y ^ x.z ^ x.w;
        }
    }
    // The compiler cannot know that no fold gives this number; so it has to read.
    if (folded == 0x9E3779B9u) *fold = folded;
}
"""


@functools.cache
def kernel(resident: int, in_flight: int) -> Any:
    """The compiled kernel."""
    import cupy

    return cupy.RawKernel(SOURCE, "read_floor", ("--std=c++17", f"-DRESIDENT={resident}", f"-DIN_FLIGHT={in_flight}"))


def ranges(sizes: tuple[int, int], num_bytes: int, num_sets: int) -> list[tuple[int, int]]:
    """(array, first byte) of each set's bytes in two arrays of these sizes: even sets from the first, odd from the second."""
    places = []
    for i in range(num_sets):
        array, turn = i % 2, i // 2
        room = sizes[array] - num_bytes
        if room < 0:
            raise ValueError(f"num_bytes: expected at most {sizes[array]}, got {num_bytes}")
        places.append((array, min(turn * num_bytes, room) // 16 * 16))
    return places


def read_floor(arrays: tuple[Any, Any], num_bytes: int, num_sets: int, repeats: int = timing.REPEATS) -> float:
    """Microseconds to read `num_bytes` of device memory, a different part of the two arrays in each of `num_sets` turns."""
    import cupy

    pools = [array.reshape(-1).view(np.uint8) for array in arrays]
    vectors = num_bytes // 16
    places = ranges((pools[0].size, pools[1].size), 16 * vectors, num_sets)
    parts = [pools[array][first : first + 16 * vectors] for array, first in places]
    fold = cupy.zeros(1, np.uint32)
    sms = int(cupy.cuda.Device().attributes["MultiProcessorCount"])

    def sample() -> float:
        times = []
        for blocks, resident, in_flight in VARIANTS:
            read = kernel(resident, in_flight)
            call = lambda i, read=read, grid=(blocks * sms,): read(grid, (THREADS,), (parts[i], np.uint32(vectors), fold))
            times += [timing.measure(call, num_sets, repeats).us for _ in range(3)]
        return min(times)

    return timing.settled(sample)
