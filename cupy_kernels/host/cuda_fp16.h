// __half as its bits, with the conversions the kernels use: exact where the hardware has them, in software elsewhere.
#pragma once
#include "cuda.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

struct __half { unsigned short x; };
struct alignas(4) __half2 { __half x, y; };

inline float __half2float(__half h) {
#if defined(__F16C__)
    return _cvtsh_ss(h.x);
#else
    const unsigned sign = (h.x & 0x8000u) << 16, exponent = h.x >> 10 & 31, fraction = h.x & 0x3ffu;
    // A subnormal is its fraction times 2^-24, exactly.
    if (exponent == 0) return cuda::bits<float>(sign | cuda::bits<unsigned>(fraction * 0x1p-24f));
    if (exponent == 31) return cuda::bits<float>(sign | 0x7f800000u | fraction << 13);
    return cuda::bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
#endif
}

// Round to nearest, ties to even.
inline __half __float2half_rn(float f) {
#if defined(__F16C__)
    return {(unsigned short)_cvtss_sh(f, 0)};
#else
    const unsigned word = cuda::bits<unsigned>(f), sign = word >> 16 & 0x8000u, magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {(unsigned short)(sign | 0x7fffu)};
    // 65520 and above rounds to infinity.
    if (magnitude >= 0x477ff000u) return {(unsigned short)(sign | 0x7c00u)};
    // Below the smallest normal: adding 0.5 leaves the fraction, rounded by the addition, in the low bits.
    if (magnitude < 0x38800000u)
        return {(unsigned short)(sign | (cuda::bits<unsigned>(cuda::bits<float>(magnitude) + 0.5f) - 0x3f000000u))};
    const unsigned odd = magnitude >> 13 & 1;
    return {(unsigned short)(sign | (magnitude - 0x38000000u + 0xfffu + odd) >> 13)};
#endif
}
inline __half __float2half(float f) { return __float2half_rn(f); }
inline __half __ushort_as_half(unsigned short x) { return {x}; }
inline unsigned short __half_as_ushort(__half h) { return h.x; }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half __low2half(__half2 h) { return h.x; }
inline __half __high2half(__half2 h) { return h.y; }
