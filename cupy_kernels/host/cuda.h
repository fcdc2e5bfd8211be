// The CUDA language on a CPU, enough of it to run this project's kernels as they are: a test vehicle, clear rather than fast.
#pragma once
#include "fibers.h"

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

inline void __syncthreads() { cuda::meet(cuda::block.barrier); }
inline int __syncthreads_and(int predicate) {
    // By turns: a thread may come to the next barrier while another has not looked at this one's result yet.
    static bool all[2];
    bool& agreed = all[cuda::block.barrier.generation & 1];
    if (cuda::block.barrier.arrived == 0) agreed = true;
    agreed &= predicate != 0;
    __syncthreads();
    return agreed;
}
inline int __syncthreads_or(int predicate) { return !__syncthreads_and(!predicate); }
inline void __syncwarp(unsigned = 0xffffffffu) { cuda::meet(cuda::my_warp().meeting); }
// Blocks and threads take turns on one core: memory is always in order.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) {}

template <class T> inline T __shfl_sync(unsigned mask, T x, int lane) { return cuda::shuffle(mask, x, lane); }
template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int bits) { return cuda::shuffle(mask, x, cuda::my_lane() ^ bits); }
template <class T> inline T __shfl_up_sync(unsigned mask, T x, int by) {
    const int lane = cuda::my_lane();
    return cuda::shuffle(mask, x, lane >= by ? lane - by : lane);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T x, int by) {
    const int lane = cuda::my_lane();
    return cuda::shuffle(mask, x, lane + by < cuda::WARP ? lane + by : lane);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    const uint32_t word = predicate != 0;
    const auto board = cuda::exchange(&word, 1);
    unsigned votes = 0;
    for (int lane = 0; lane < cuda::WARP; lane++) votes |= board[lane][0] << lane;
    return votes;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

namespace cuda {
template <class To, class From> inline To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
}  // namespace cuda
inline float __int_as_float(int x) { return cuda::bits<float>(x); }
inline int __float_as_int(float x) { return cuda::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cuda::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return cuda::bits<unsigned>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }

// Byte i of the result is the byte of {a, b} that nibble i of the selector names (the sign-spreading bit is not provided).
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
