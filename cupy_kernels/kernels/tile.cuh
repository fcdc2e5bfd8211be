// What one warp does with a tile of 16 tokens of one KV head on tensor cores: S^T = K Q^T, weights, O^T += V^T P^T.
//
// Tokens (in S) and head_dim (in O) lie on the 16 rows of an MMA and query heads on its 8 columns, so that up to 8 heads cost one
// N tile and padding is free. A sum over columns may run over them in any order, so a lane has 16 contiguous bytes of K where the
// instruction speaks of scattered pairs, and q is read in the same order. Throughout, lane = 4 g + t; operands as in ptx.cuh.
//
// Constants: KV (__half or __nv_bfloat16), HEAD_DIM, N_TILES (of 8 query heads), P_PARTS, WHOLE_TILES (page_size % 16 == 0).
#include "copy.cuh"
#include "state.cuh"

#define N_HEADS (8 * N_TILES)

// How p is cut into 16-bit parts: p * FOLD = part 0 + part 1 * UNIT + ...
template <class T> struct WeightFormat;
// float16 has few exponents: small p are folded up, remainders are kept 2^11 times larger. A maximum that lies up to 2^LAZY above m
// needs no rescaling, as long as FOLD * 2^LAZY stays below 65504.
template <> struct WeightFormat<__half> { static constexpr float FOLD = 1024.f, UNIT = 1.f / 2048, LAZY = 5.f; };
// bfloat16 has the exponents of float32, V may use them all, so p must not exceed 1. (FOLD 1 would do, but then ptxas spills.)
template <> struct WeightFormat<__nv_bfloat16> { static constexpr float FOLD = 0.5f, UNIT = 1.f, LAZY = 0.f; };
using Format = WeightFormat<KV>;
static_assert(P_PARTS == 1 || P_PARTS == 2 || (P_PARTS == 3 && Format::UNIT == 1.f), "three bfloat16 hold a float32");

__device__ __forceinline__ unsigned pack(float a, float b, __half) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ unsigned pack(float a, float b, __nv_bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ float2 unpack(unsigned word, __half) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
__device__ __forceinline__ float2 unpack(unsigned word, __nv_bfloat16) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// The attention state of a warp for its query heads, undivided: lane (g, t) has heads 8 n + 2t and the next; l is over its own
// tokens only until store_states() adds them up. acc[n][j]: word j's first column for both heads, then its second.
struct WarpState {
    Softmax heads[N_TILES][2];
    float acc[N_TILES][V_WORDS][4];
};

// Rows of q in shared memory, one a query head, this many elements apart: 16 bytes of 8 neighbouring lanes then fill all 32 banks.
#define Q_STRIDE ((HEAD_DIM + 31) / 64 * 64 + 32)

// s[n] = q . k: of tokens g (two words) and g + 8 for heads 8 n + 2t and the next. Two sums side by side: half the wait, and half
// of what the tensor cores truncate.
__device__ __forceinline__ void dots(float (&s)[N_TILES][4], const char* slot, const KV* q, int lane) {
    float sums[N_TILES][2][4] = {};
    #pragma unroll
    for (int piece = 0; piece < (K_WORDS + 3) / 4; piece++) {
        const uint4 k0 = load_words<false, 4>(slot, lane / 4, lane % 4, 4 * piece);
        const uint4 k1 = load_words<false, 4>(slot, lane / 4 + 8, lane % 4, 4 * piece);
        const unsigned low[4] = {k0.x, k1.x, k0.y, k1.y}, high[4] = {k0.z, k1.z, k0.w, k1.w};
        #pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            const KV* at = q + (8 * n + lane / 4) * Q_STRIDE + column_of<4>(lane % 4, piece);
            if (piece < K_WORDS / 4) {
                const uint4 x = load_shared_16(at);
                mma_16x8x16(sums[n][0], low, x.x, x.y, KV());
                mma_16x8x16(sums[n][1], high, x.z, x.w, KV());
            } else {
                const uint2 x = load_shared_8(at);
                mma_16x8x16(sums[n][0], low, x.x, x.y, KV());
            }
        }
    }
    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = sums[n][0][i] + sums[n][1][i];
}

// Tokens past the end weigh nothing: their scores are replaced. (Their V are zeros.)
__device__ __forceinline__ void hide_rows(float (&s)[N_TILES][4], int last_row, int lane) {
    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = lane / 4 + i / 2 * 8 > last_row ? NEG_INF : s[n][i];
}

// Raises every maximum to what this tile holds, and rescales. Seldom needed.
__device__ __forceinline__ void raise_maxima(WarpState& state, const float (&s)[N_TILES][4]) {
    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = fmaxf(s[n][h], s[n][2 + h]);
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            const float alpha = state.heads[n][h].raise(top);
            #pragma unroll
            for (int j = 0; j < V_WORDS; j++) state.acc[n][j][h] *= alpha, state.acc[n][j][2 + h] *= alpha;
        }
}

// Scores -> P^T as MMA operands in P_PARTS parts; l grows by exactly what will multiply V.
__device__ __forceinline__ void weigh(unsigned (&p)[N_TILES][P_PARTS][2], WarpState& state, const float (&s)[N_TILES][4]) {
    bool due = false;
    // Written so that NaN counts as due: the careful way is always right.
    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) due |= !(state.heads[n][i % 2].excess(s[n][i]) <= Format::LAZY);
    if (__any_sync(0xffffffffu, due)) raise_maxima(state, s);

    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float rest[2], parts[P_PARTS][2];
            #pragma unroll
            for (int h = 0; h < 2; h++) rest[h] = state.heads[n][h].weight(s[n][2 * half + h]) * Format::FOLD;
            #pragma unroll
            for (int part = 0; part < P_PARTS; part++) {
                const unsigned word = pack(rest[0], rest[1], KV());
                const float2 rounded = unpack(word, KV());
                parts[part][0] = rounded.x, parts[part][1] = rounded.y;
                // Exact: p and its rounding share all leading bits, and UNIT is a power of two.
                #pragma unroll
                for (int h = 0; h < 2; h++) rest[h] = (rest[h] - parts[part][h]) * (1.f / Format::UNIT);
                p[n][part][half] = transpose_8x8(word);
            }
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                float sum = parts[P_PARTS - 1][h];
                #pragma unroll
                for (int part = P_PARTS - 2; part >= 0; part--) sum = fmaf(sum, Format::UNIT, parts[part][h]);
                state.heads[n][h].l += sum;
            }
        }
}

__device__ __forceinline__ unsigned word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// Words of V a lane reads at once: 4 cost the least, registers decide.
#define V_AT_ONCE (HEAD_DIM > 128 || N_TILES * P_PARTS == 6 ? 1 : HEAD_DIM > 64 && N_TILES == 1 ? 4 : 2)

// acc += V^T P^T. Each tile's product starts from zero and is added in float32, to nearest: tensor cores truncate, and in a running
// sum that would add up to a drift with the number of tokens. Of the parts of p after the first, truncation does not matter.
__device__ __forceinline__ void accumulate(
    WarpState& state, const char* slot, const unsigned (&p)[N_TILES][P_PARTS][2], int lane) {
    #pragma unroll
    for (int first = 0; first < V_WORDS; first += V_AT_ONCE) {
#if __CUDA_ARCH__ != 900 && N_TILES * P_PARTS > 2
        // Never so, but ptxas schedules nothing across a branch: it would have so many products under way that it spills, on sm_120
        // most. sm_90, the one that was measured, does not spill and goes without.
        if (first == V_WORDS / 4 * 2 && lane > 31) return;
#endif
        uint4 v[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) v[i] = load_words<true, V_AT_ONCE>(slot, v_token(i, lane % 4), lane / 4, first);
        #pragma unroll
        for (int j = first; j < first + V_AT_ONCE && j < V_WORDS; j++) {
            // Row g of this block of V^T is the first column of word j, row g + 8 the second; tokens are paired along a row.
            unsigned a[4];
            #pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = __byte_perm(word_of(v[i / 2 * 2], j - first), word_of(v[i / 2 * 2 + 1], j - first), i % 2 ? 0x7632 : 0x5410);
            #pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                float high[4] = {}, low[4] = {};
                mma_16x8x16(high, a, p[n][0][0], p[n][0][1], KV());
                #pragma unroll
                for (int part = P_PARTS - 1; part > 0; part--) mma_16x8x16(low, a, p[n][part][0], p[n][part][1], KV());
                #pragma unroll
                for (int i = 0; i < 4; i++) state.acc[n][j][i] += P_PARTS == 1 ? high[i] : fmaf(low[i], Format::UNIT, high[i]);
            }
        }
    }
}
