// What one warp does with a tile of 16 tokens of one KV head on tensor cores: S^T = K Q^T, weights, O^T += V^T P^T.
//
// Tokens (in S) and head_dim (in O) lie on the 16 rows of an MMA and query heads on its 8 columns, so that up to 8 heads cost one
// N tile and padding is free. K and V go from global memory straight into MMA operands: a sum over columns may run over them in any
// order, so a lane loads 16 contiguous bytes where the instruction speaks of scattered pairs, and q is read in the same order.
// Throughout, lane = 4 g + t; operands as in ptx.cuh.
//
// Constants: KV (__half or __nv_bfloat16), HEAD_DIM, N_TILES (of 8 query heads), P_PARTS, WHOLE_TILES (page_size % 16 == 0).
#include "types.cuh"
#include "ptx.cuh"
#include "state.cuh"
#include "pages.cuh"

#define TILE 16
#define N_HEADS (8 * N_TILES)
// Words of two elements: of a K row that 4 lanes share, of a V row that 8 lanes share.
#define K_WORDS (HEAD_DIM / 8)
#define V_WORDS (HEAD_DIM / 16)
static_assert(HEAD_DIM % 16 == 0 && V_WORDS % 4 != 3, "a lane's part of a row must be made of pieces of 16, 8 and 4 bytes");
static_assert(P_PARTS >= 1 && P_PARTS <= 3, "three bfloat16 hold a float32");

// How p is cut into 16-bit parts: p * FOLD = part 0 + part 1 * UNIT + ...
template <class T> struct WeightFormat;
// float16 has few exponents: small p are folded up, remainders are kept 2^11 times larger. A maximum that lies up to 2^LAZY above m
// needs no rescaling, as long as FOLD * 2^LAZY stays below 65504.
template <> struct WeightFormat<__half> { static constexpr float FOLD = 1024.f, UNIT = 1.f / 2048, LAZY = 5.f; };
// bfloat16 has the exponents of float32, V may use them all, so p must not exceed 1.
template <> struct WeightFormat<__nv_bfloat16> { static constexpr float FOLD = 1.f, UNIT = 1.f, LAZY = 0.f; };
using Format = WeightFormat<KV>;

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

// Column of the first element of piece `piece` of a row that LANES lanes share: 16 bytes a lane, then one smaller rest.
template <int LANES> __device__ __forceinline__ int column_of(int lane, int piece) {
    constexpr int WORDS = HEAD_DIM / 2 / LANES, PIECES = WORDS / 4, REST = WORDS % 4;
    return piece * LANES * 8 + lane * (piece < PIECES ? 8 : 2 * REST);
}

// A lane's words of such a row in global memory.
template <int LANES, int WORDS> __device__ __forceinline__ void load_row(unsigned (&words)[WORDS], const KV* row, int lane) {
    constexpr int PIECES = WORDS / 4, REST = WORDS % 4;
    const KV* first = row + column_of<LANES>(lane, 0);
    #pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        const uint4 x = load_streaming(first + piece * LANES * 8);
        words[4 * piece] = x.x, words[4 * piece + 1] = x.y, words[4 * piece + 2] = x.z, words[4 * piece + 3] = x.w;
    }
    const KV* rest = row + column_of<LANES>(lane, PIECES);
    if constexpr (REST == 1) words[WORDS - 1] = load_streaming_4(rest);
    if constexpr (REST == 2) {
        const uint2 x = load_streaming_8(rest);
        words[WORDS - 2] = x.x, words[WORDS - 1] = x.y;
    }
}

// K of one KV head, or V: its first element in page 0, and strides in elements.
struct Cache {
    const KV* base;
    long long page_stride;
    int slot_stride;
};

// Page and slot of the tile's token lane % 16; of its first token where a page holds the whole tile. Past `end` the last token is
// repeated: what is not visible is never read, neither its page id nor its slot.
struct Place { int page, slot; };
__device__ __forceinline__ Place place_of(const PagedRow& pages, int first, int end, int lane) {
    const unsigned token = WHOLE_TILES ? first : min(first + lane % TILE, end - 1), size = pages.page_size;
    return {pages.page_table[token / size], (int)(token % size)};
}
__device__ __forceinline__ const KV* row_at(const Cache& cache, const Place& place, int row, int last_row) {
    int page = place.page, slot = place.slot + min(row, last_row);
    if (!WHOLE_TILES) {
        page = __shfl_sync(0xffffffffu, place.page, row);
        slot = __shfl_sync(0xffffffffu, place.slot, row);
    }
    return cache.base + page * cache.page_stride + (long long)slot * cache.slot_stride;
}

struct Tile {
    unsigned k[2][K_WORDS];  // of tokens g, g + 8
    unsigned v[4][V_WORDS];  // of tokens 2t, 2t + 1, 2t + 8, 2t + 9
};
__device__ __forceinline__ int v_token(int i, int t) { return 2 * t + i % 2 + i / 2 * 8; }

__device__ __forceinline__ void load_k(Tile& tile, const Cache& k, const Place& place, int last_row, int lane) {
    #pragma unroll
    for (int i = 0; i < 2; i++) load_row<4>(tile.k[i], row_at(k, place, lane / 4 + 8 * i, last_row), lane % 4);
}
__device__ __forceinline__ void load_v(Tile& tile, const Cache& v, const Place& place, int last_row, int lane) {
    #pragma unroll
    for (int i = 0; i < 4; i++) load_row<8>(tile.v[i], row_at(v, place, v_token(i, lane % 4), last_row), lane / 4);
}

// The attention state of a warp for its query heads, undivided: lane (g, t) has heads 8 n + 2t and the next; l is over its own
// tokens only until store_states() adds them up. acc[n][j]: word j's first column for both heads, then its second.
struct WarpState {
    Softmax heads[N_TILES][2];
    float acc[N_TILES][V_WORDS][4];
};

// Rows of q in shared memory, one a query head, this many elements apart: 16 bytes of 8 neighbouring lanes then fill all 32 banks.
#define Q_STRIDE ((HEAD_DIM + 31) / 64 * 64 + 32)

// sum += k . q over 16 columns: words i, i + 1 of the lane's K rows, and of q.
__device__ __forceinline__ void dot_step(float (&sum)[4], const Tile& tile, int i, unsigned q0, unsigned q1) {
    const unsigned a[4] = {tile.k[0][i], tile.k[1][i], tile.k[0][i + 1], tile.k[1][i + 1]};
    mma_16x8x16(sum, a, q0, q1, KV());
}

// s[n] = q . k: of tokens g (two words) and g + 8 for heads 8 n + 2t and the next. Two sums side by side: half the wait, and half
// of what the tensor cores truncate.
__device__ __forceinline__ void dots(float (&s)[N_TILES][4], const Tile& tile, const KV* q, int lane) {
    constexpr int PIECES = K_WORDS / 4;
    #pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        const KV* row = q + (8 * n + lane / 4) * Q_STRIDE;
        float sums[2][4] = {};
        #pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            const uint4 x = load_shared(row + column_of<4>(lane % 4, piece));
            dot_step(sums[0], tile, 4 * piece, x.x, x.y);
            dot_step(sums[1], tile, 4 * piece + 2, x.z, x.w);
        }
        if constexpr (K_WORDS % 4 == 2) {
            const uint2 x = load_shared_8(row + column_of<4>(lane % 4, PIECES));
            dot_step(sums[0], tile, 4 * PIECES, x.x, x.y);
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = sums[0][i] + sums[1][i];
    }
}

// Tokens past the end weigh nothing: their scores are replaced, whatever they are, and so are their V.
__device__ __forceinline__ void hide_rows(float (&s)[N_TILES][4], Tile& tile, int last_row, int lane) {
    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = lane / 4 + i / 2 * 8 > last_row ? NEG_INF : s[n][i];
    #pragma unroll
    for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int j = 0; j < V_WORDS; j++) tile.v[i][j] = v_token(i, lane % 4) > last_row ? 0u : tile.v[i][j];
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

// acc += V^T P^T. Each tile's product starts from zero and is added in float32, to nearest: tensor cores truncate, and in a running
// sum that would add up to a drift with the number of tokens.
__device__ __forceinline__ void accumulate(WarpState& state, const Tile& tile, const unsigned (&p)[N_TILES][P_PARTS][2]) {
    #pragma unroll
    for (int j = 0; j < V_WORDS; j++) {
        // Row g of this block of V^T is the first column of word j, row g + 8 the second; tokens are paired along a row.
        unsigned a[4];
        #pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = __byte_perm(tile.v[i / 2 * 2][j], tile.v[i / 2 * 2 + 1][j], i % 2 ? 0x7632 : 0x5410);
        #pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            float products[P_PARTS][4] = {};
            #pragma unroll
            for (int part = 0; part < P_PARTS; part++) mma_16x8x16(products[part], a, p[n][part][0], p[n][part][1], KV());
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                float sum = products[P_PARTS - 1][i];
                #pragma unroll
                for (int part = P_PARTS - 2; part >= 0; part--) sum = fmaf(sum, Format::UNIT, products[part][i]);
                state.acc[n][j][i] += sum;
            }
        }
    }
}
