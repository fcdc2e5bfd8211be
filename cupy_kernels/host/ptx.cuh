// The instructions of kernels/ptx.cuh in plain C++. This file stands in for that one on the CPU.
#include <cuda_fp16.h>
#include <cuda_bf16.h>

inline float ex2(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.f : y;
}

inline uint4 load_streaming(const void* address) { return *static_cast<const uint4*>(address); }
inline uint4 load_shared_16(const void* address) { return *static_cast<const uint4*>(address); }
inline uint2 load_shared_8(const void* address) { return *static_cast<const uint2*>(address); }
inline unsigned load_shared_4(const void* address) { return *static_cast<const unsigned*>(address); }
inline int lane_index() { return cuda::my_lane(); }

namespace cuda {
inline float half_bits_to_float(unsigned x, __half) { return __half2float({(unsigned short)x}); }
inline float half_bits_to_float(unsigned x, __nv_bfloat16) { return __bfloat162float({(unsigned short)x}); }

inline int biased_exponent(double x) { return bits<uint64_t>(x) >> 52 & 0x7ff; }

// One step of a tensor core: c + sum a_i b_i over 16 products. Products are exact; all terms are aligned to the largest exponent,
// kept to 2 bits below float32's last and truncated there; the sum is truncated to float32. A product's exponent is the sum of its
// factors', even where its significand is 2 or more. (Hopper, after Khattak & Mikaitis 2025, arXiv 2512.07004; bit for bit what
// `python -m verify hardware` finds on an H200.)
inline float block_fma(float c, const float* a, const float* b) {
    double terms[17] = {c}, sum = c;
    int largest = biased_exponent(c);
    for (int i = 0; i < 16; i++) {
        sum += terms[i + 1] = double(a[i]) * double(b[i]);
        const int exponent = terms[i + 1] == 0.0 ? 0 : biased_exponent(a[i]) + biased_exponent(b[i]) - 1023;
        largest = exponent > largest ? exponent : largest;
    }
    if (largest == 0) return 0.f;
    if (!std::isfinite(sum)) return float(sum);
    // 1 / unit of the last kept bit, which is 23 + 2 bits below the largest term's leading one.
    const double scale = bits<double>(uint64_t(2 * 1023 + 25 - largest) << 52);
    int64_t units = 0;
    for (double term : terms) units += int64_t(term * scale);
    sum = double(units) / scale;
    const float result = float(sum);
    return fabs(double(result)) > fabs(sum) ? nextafterf(result, 0.f) : result;
}

template <class H> inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, H type) {
    uint32_t words[16] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto board = exchange(words, 6);
    const int g = my_lane() / 4, t = my_lane() % 4;
    float rows[2][16], columns[2][16];
    for (int k = 0; k < 16; k++) {
        // A[row][k] is in lane 4 * (row % 8) + k % 8 / 2, register (row >= 8) + 2 * (k >= 8), half k % 2; B[k][n] likewise.
        for (int half = 0; half < 2; half++) {
            rows[half][k] = half_bits_to_float(board[4 * g + k % 8 / 2][half + 2 * (k / 8)] >> 16 * (k % 2) & 0xffff, type);
            columns[half][k] = half_bits_to_float(board[4 * (2 * t + half) + k % 8 / 2][4 + k / 8] >> 16 * (k % 2) & 0xffff, type);
        }
    }
    for (int i = 0; i < 4; i++) d[i] = block_fma(d[i], rows[i / 2], columns[i % 2]);
}
}  // namespace cuda

inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half type) {
    cuda::mma(d, a, b0, b1, type);
}
inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16 type) {
    cuda::mma(d, a, b0, b1, type);
}

inline unsigned transpose_8x8(unsigned x) {
    const auto board = cuda::exchange(&x, 1);
    // Element [r][c] of the result is [c][r] of the argument: this lane holds r = lane / 4, c = 2 (lane % 4) and the next.
    const int r = cuda::my_lane() / 4, c = cuda::my_lane() % 4 * 2;
    const auto element = [&](int row, int column) { return board[4 * row + column / 2][0] >> 16 * (column % 2) & 0xffff; };
    return element(c, r) | element(c + 1, r) << 16;
}

template <class T> inline void store_relaxed(T* address, T x) { *address = x; }
template <class T> inline T load_relaxed(const T* address) { return *address; }
inline void add_relaxed_if(bool wanted, unsigned* address, unsigned x) {
    if (wanted) *address += x;
}
inline void copy_async_16(void* to_shared, const void* from) { cuda::self().copies.ask(to_shared, from); }
// Not waited for, any time will do: it arrives at once.
inline void copy_async_16_if(bool wanted, void* to_shared, const void* from) {
    if (wanted) memcpy(to_shared, from, 16);
}
inline void commit_copies() { cuda::self().copies.commit(); }
inline void wait_for_committed_copies() { cuda::self().copies.wait_for_committed(); }
inline void wait_for_copies() { cuda::self().copies.wait_for_all(); }
inline float computed_here(float x) { return x; }
inline void look_again() { cuda::wait_forever(); }
inline void wait_for_previous_launch() {}
inline void prefetch(const void*, int) {}
inline void let_next_launch_begin() {}
