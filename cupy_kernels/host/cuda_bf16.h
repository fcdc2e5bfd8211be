// __nv_bfloat16 as its bits: the upper half of a float.
#pragma once
#include "cuda.h"

struct __nv_bfloat16 { unsigned short x; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float __bfloat162float(__nv_bfloat16 h) { return cuda::bits<float>(unsigned(h.x) << 16); }

// Round to nearest, ties to even; the payload of a NaN may be lost, its being NaN not.
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
    const unsigned word = cuda::bits<unsigned>(f);
    if (f != f) return {0x7fff};
    return {(unsigned short)(word + 0x7fffu + (word >> 16 & 1) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float f) { return __float2bfloat16_rn(f); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {__bfloat162float(h.x), __bfloat162float(h.y)}; }
