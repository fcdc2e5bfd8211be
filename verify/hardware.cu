// The functions and units whose error the budget relies on, swept and probed where they run: a GPU, or the CPU stand-in.
// Inputs are float bit patterns i * step, i < count: all 2^32 of them with step 1, an even sample with an odd step.
//
// Constants: FUNCTION, EXACT and SCALED (of sweep_function), HALF (of the others), THREADS (of multiply: 32).
#include "types.cuh"
#include "ptx.cuh"
#if !defined(FUNCTION)
#define FUNCTION ex2
#define EXACT exp2
#define SCALED 0
#endif
#if !defined(HALF)
#define HALF __half
#endif

// The kernels use log2f; this is here to be compared with it. The stand-in has no such instruction.
#if defined(__CUDACC__)
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

__device__ __forceinline__ bool is_nan(float x) { return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u; }
__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u; }

__device__ __forceinline__ long long my_thread() { return blockIdx.x * (long long)THREADS + threadIdx.x; }
__device__ __forceinline__ long long all_threads() { return gridDim.x * (long long)THREADS; }

// FUNCTION (float32) against EXACT (float64, itself good to a unit in its last place). Each thread keeps its own extremes; grid.x
// blocks of THREADS. Errors are counted where the exact result is a normal float32 and the input normal or zero; elsewhere (flushed,
// overflowing, NaN, outside the domain) only the kind of the result has to agree. The error is relative; with SCALED it is relative
// to max(1, |exact|): a logarithm near 0 is to be compared with what it is added to.
extern "C" __global__ void __launch_bounds__(THREADS) sweep_function(
    unsigned first,
    unsigned step,
    long long count,
    float* largest_ulp,              // [threads] error in units in the last place of the exact result
    float* largest,                  // [threads] the largest error
    unsigned* worst,                 // [threads] its input
    float* sum_relative,             // [threads] sum of error / exact, over `used`
    long long* used,                 // [threads] inputs counted
    long long* wrong_kind,           // [threads] NaN, infinity or zero where the other is not
    unsigned* wrong_input) {         // [threads] one such input
    const long long thread = my_thread(), threads = all_threads();
    float ulp = 0.f, most = 0.f;
    double sum = 0.0;
    unsigned at = 0, wrong_at = 0;
    long long normal = 0, wrong = 0;
    for (long long i = thread; i < count; i += threads) {
        const unsigned word = first + (unsigned)i * step;
        const float x = __uint_as_float(word), got = FUNCTION(x);
        // A subnormal input may be flushed before it is used.
        const unsigned magnitude = word & 0x7fffffffu;
        if (magnitude != 0u && magnitude < 0x00800000u) continue;
        const double exact = EXACT((double)x), size = fabs(exact);
        if (size >= 0x1p-126 && size <= 0x1.fffffep127) {
            const double error = (double)got - exact;
            int exponent;
            frexp(exact, &exponent);
            const float relative = (float)(fabs(error) / (SCALED ? fmax(1.0, size) : size));
            ulp = fmaxf(ulp, (float)ldexp(fabs(error), 24 - exponent));
            if (relative > most) at = word;
            most = fmaxf(most, relative);
            sum += error / exact;
            normal++;
            if (is_finite(got)) continue;
        } else if (exact != exact ? is_nan(got) : size < 0x1p-126 ? fabsf(got) <= 0x1p-126f : !is_nan(got) && !is_finite(got)) {
            continue;
        }
        wrong++;
        wrong_at = word;
    }
    largest_ulp[thread] = ulp;
    largest[thread] = most;
    worst[thread] = at;
    sum_relative[thread] = (float)sum;
    used[thread] = normal;
    wrong_kind[thread] = wrong;
    wrong_input[thread] = wrong_at;
}

__device__ __forceinline__ unsigned bits(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ unsigned bits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
template <class T> __device__ __forceinline__ T from_bits(unsigned short x);
template <> __device__ __forceinline__ __half from_bits<__half>(unsigned short x) { return __ushort_as_half(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_bits<__nv_bfloat16>(unsigned short x) { return __ushort_as_bfloat16(x); }

// Round to nearest, ties to even, in integers alone: a format of FRACTION stored bits and smallest normal exponent LEAST.
template <int FRACTION, int LEAST> __device__ unsigned round_to_nearest_even(unsigned word) {
    const unsigned sign = word >> 31 << 15, magnitude = word & 0x7fffffffu;
    const int exponent = max((int)(magnitude >> 23), 1) - 127;
    const unsigned significand = (magnitude & 0x7fffffu) | (magnitude >= 0x00800000u ? 0x800000u : 0u);
    const int dropped = 23 - FRACTION + max(0, LEAST - exponent);
    unsigned kept = 0;
    if (dropped <= 24) {
        const unsigned rest = significand & ((1u << dropped) - 1u), half = 1u << (dropped - 1);
        kept = significand >> dropped;
        kept += rest > half || (rest == half && (kept & 1u));
    }
    // The hidden bit carries into the exponent, as a significand that was rounded up to the next binade does.
    if (exponent > LEAST) kept += (unsigned)(exponent - LEAST) << FRACTION;
    const unsigned infinity = 0x7fffu >> FRACTION << FRACTION;
    return sign | min(kept, infinity);
}
__device__ __forceinline__ unsigned rounded(unsigned word, __half) { return round_to_nearest_even<10, -14>(word); }
__device__ __forceinline__ unsigned rounded(unsigned word, __nv_bfloat16) { return round_to_nearest_even<7, -126>(word); }

// The cast that stores outputs and partial states, against integers. NaN must stay NaN, whatever its payload.
extern "C" __global__ void __launch_bounds__(THREADS) sweep_cast(
    unsigned step,
    long long count,
    long long* mismatches,           // [threads]
    unsigned* mismatch) {            // [threads] one such input
    const long long thread = my_thread(), threads = all_threads();
    long long wrong = 0;
    unsigned at = 0;
    for (long long i = thread; i < count; i += threads) {
        const unsigned word = (unsigned)i * step;
        const HALF got = from_float<HALF>(__uint_as_float(word));
        if (is_nan(__uint_as_float(word)) ? is_nan(to_float(got)) : bits(got) == rounded(word, HALF{})) continue;
        wrong++;
        at = word;
    }
    mismatches[thread] = wrong;
    mismatch[thread] = at;
}

// d = c + a b on tensor cores, one warp and one 16x8x16 product a block. Bits in, bits out.
extern "C" __global__ void __launch_bounds__(THREADS) multiply(
    const unsigned* a,               // [blocks][16][8] pairs of HALF along k
    const unsigned* b,               // [blocks][8][8] pairs of HALF along k: column by column
    const float* c,                  // [blocks][16][8]
    float* d) {                      // as c
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const unsigned* rows = a + blockIdx.x * 128LL;
    const unsigned* columns = b + blockIdx.x * 64LL;
    const unsigned fragment[4] = {rows[8 * g + t], rows[8 * (g + 8) + t], rows[8 * g + t + 4], rows[8 * (g + 8) + t + 4]};
    const long long at[2] = {blockIdx.x * 128LL + 8 * g + 2 * t, blockIdx.x * 128LL + 8 * (g + 8) + 2 * t};
    float sum[4] = {c[at[0]], c[at[0] + 1], c[at[1]], c[at[1] + 1]};
    mma_16x8x16(sum, fragment, columns[8 * g + t], columns[8 * g + t + 4], HALF{});
    d[at[0]] = sum[0];
    d[at[0] + 1] = sum[1];
    d[at[1]] = sum[2];
    d[at[1] + 1] = sum[3];
}
