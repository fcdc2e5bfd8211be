// What one block does with a range of tokens: its warps stream tiles of 16, then their states meet in shared memory.
//
// A block works for KV_HEADS neighbouring KV heads and up to N_HEADS query heads of each: warp w for KV head w % KV_HEADS, on every
// SLOTS-th tile. "Query head of the block": kv * heads + h, with `heads` query heads a KV head.
//
// Constants: those of tile.cuh, WARPS, KV_HEADS. Dynamic shared memory: see Exchange.
#include "tile.cuh"

#define THREADS (32 * WARPS)
#define SLOTS (WARPS / KV_HEADS)
#define COLUMNS (HEAD_DIM / 4)
static_assert(WARPS % KV_HEADS == 0 && WARPS <= 32, "every KV head of the block has as many warps");

// One token range of one request, for the KV heads and query heads of one block.
struct Work {
    PagedRow pages;
    Range tokens;
    const KV* q;  // of the block's first query head
    Cache k, v;   // of its first KV head
    long long q_head_stride, k_head_stride, v_head_stride;
    int group_size, heads;
    float scale_log2;
};

// Heads of padding become 0. A negative scale is taken into q, so that the largest product is the largest score.
__device__ __forceinline__ void load_q(KV* q_shared, const Work& work) {
    constexpr int PIECES = HEAD_DIM / 8;
    const unsigned sign = work.scale_log2 < 0.f ? 0x80008000u : 0u;
    #pragma unroll 1
    for (int i = threadIdx.x; i < KV_HEADS * N_HEADS * PIECES; i += THREADS) {
        const int row = i / PIECES, piece = i % PIECES, kv = row / N_HEADS, h = row % N_HEADS;
        uint4 x = make_uint4(0, 0, 0, 0);
        // q[kv * group_size + h, 8 piece ...] from the block's first query head on
        if (h < work.heads)
            x = *reinterpret_cast<const uint4*>(work.q + (kv * work.group_size + h) * work.q_head_stride + 8 * piece);
        *reinterpret_cast<uint4*>(q_shared + row * Q_STRIDE + 8 * piece) =
            make_uint4(x.x ^ sign, x.y ^ sign, x.z ^ sign, x.w ^ sign);
    }
}

// A warp's tiles, one after another. The next tile's K is asked for as soon as this one's is used up, then its V, and the page id of
// the tile after next: all three are on their way while this tile is computed. Where K, V, O and P leave no registers for K that
// early, it waits for V, and the bytes under way are enough without it.
#define EARLY_K (HEAD_DIM / 4 * (2 + N_TILES) + 4 * N_TILES * P_PARTS + (WHOLE_TILES ? 0 : 4) < 148)
__device__ __forceinline__ void stream_tiles(WarpState& state, const Work& work, KV* q_shared) {
    const int lane = lane_index(), warp = threadIdx.x / 32, kv = warp % KV_HEADS, end = work.tokens.end;
    const Cache k = {work.k.base + kv * work.k_head_stride, work.k.page_stride, work.k.slot_stride};
    const Cache v = {work.v.base + kv * work.v_head_stride, work.v.page_stride, work.v.slot_stride};
    int first = work.tokens.begin + warp / KV_HEADS * TILE;

    Tile tile = {};
    Place place = {};
    if (first < end) {
        place = place_of(work.pages, first, end, lane);
        load_k(tile, k, place, end - 1 - first, lane);
        load_v(tile, v, place, end - 1 - first, lane);
        if (first + SLOTS * TILE < end) place = place_of(work.pages, first + SLOTS * TILE, end, lane);
    }
    // The first tiles are under way before anyone waits for q.
    load_q(q_shared, work);
    __syncthreads();
    for (; first < end; first += SLOTS * TILE) {
        const int next = first + SLOTS * TILE;
        float s[N_TILES][4];
        dots(s, tile, q_shared + kv * N_HEADS * Q_STRIDE, lane);
        if (EARLY_K && next < end) load_k(tile, k, place, end - 1 - next, lane);
        if (first + TILE > end) hide_rows(s, tile, end - 1 - first, lane);
        unsigned p[N_TILES][P_PARTS][2];
        weigh(p, state, s);
        accumulate(state, tile, p);
        if (next >= end) break;
        if (!EARLY_K) load_k(tile, k, place, end - 1 - next, lane);
        load_v(tile, v, place, end - 1 - next, lane);
        if (next + SLOTS * TILE < end) place = place_of(work.pages, next + SLOTS * TILE, end, lane);
    }
}

// An undivided state of one query head, four columns of its accumulator: what warps and blocks hand to each other.
struct Piece { float m, l; float4 acc; };
#define EMPTY_PIECE Piece{NEG_INF, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)}

// Merges pieces of one head and four columns, BATCH at a time, so that the reads of a batch don't wait for each other.
template <int BATCH, class Read> __device__ __forceinline__ Piece merge_pieces(float scale, int begin, int end, int step, Read read) {
    Softmax merged = {scale};
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
    #pragma unroll 1
    for (int first = begin; first < end; first += BATCH * step) {
        Piece pieces[BATCH];
        float top = NEG_INF;
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            pieces[i] = EMPTY_PIECE;
            if (first + i * step < end) pieces[i] = read(first + i * step);
            top = fmaxf(top, pieces[i].m);
        }
        const float alpha = merged.raise(top);
        acc = make_float4(acc.x * alpha, acc.y * alpha, acc.z * alpha, acc.w * alpha);
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float weight = merged.take(pieces[i].m, pieces[i].l);
            acc.x = fmaf(weight, pieces[i].acc.x, acc.x), acc.y = fmaf(weight, pieces[i].acc.y, acc.y);
            acc.z = fmaf(weight, pieces[i].acc.z, acc.z), acc.w = fmaf(weight, pieces[i].acc.w, acc.w);
        }
    }
    return {merged.m, merged.l, acc};
}

// Shared memory: the block's q, and where states meet. Of the warps, [WARPS][heads] sums and [WARPS][heads][COLUMNS + 1] rows, padded to
// spread over the banks; of the threads of a merge, [max(items, THREADS)] of each, items = KV_HEADS * heads * COLUMNS.
struct Exchange {
    KV* q;  // [KV_HEADS][N_HEADS][Q_STRIDE]
    float4* rows;
    float2* sums;
};
__device__ __forceinline__ Exchange exchange_at(float4* shared, int heads) {
    float4* rows = shared + KV_HEADS * N_HEADS * Q_STRIDE / 8;
    return {reinterpret_cast<KV*>(shared), rows, reinterpret_cast<float2*>(rows + max(WARPS * heads * (COLUMNS + 1), THREADS))};
}
// Pieces of one column that a thread has under way at once when it merges.
#define MERGE_BATCH 8

__device__ __forceinline__ void store_states(const Exchange& exchange, WarpState& state, int heads) {
    const int lane = lane_index(), warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    constexpr float UNFOLD = 1.f / Format::FOLD;
    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int head = 8 * n + 2 * t + h;
            float l = state.heads[n][h].l * UNFOLD;
            for (int step = 4; step < 32; step *= 2) l += __shfl_xor_sync(0xffffffffu, l, step);
            if (head >= heads) continue;
            if (g == 0) exchange.sums[warp * heads + head] = make_float2(state.heads[n][h].m, l);
            float* row = reinterpret_cast<float*>(exchange.rows + (warp * heads + head) * (COLUMNS + 1));
            #pragma unroll
            for (int j = 0; j < V_WORDS; j += 2) {
                float* to = row + column_of<8>(g, j / 4) + j % 4 * 2;
                const float a = state.acc[n][j][h] * UNFOLD, b = state.acc[n][j][2 + h] * UNFOLD;
                if (j + 1 == V_WORDS) {
                    *reinterpret_cast<float2*>(to) = make_float2(a, b);
                } else {
                    const float c = state.acc[n][j + 1][h] * UNFOLD, d = state.acc[n][j + 1][2 + h] * UNFOLD;
                    *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
                }
            }
        }
}

// The state of the block's query heads over the range of tokens, left in `exchange`.
__device__ __forceinline__ void attend(const Work& work, const Exchange& exchange) {
    WarpState state = {};
    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int h = 0; h < 2; h++) state.heads[n][h].log2_per_unit = fabsf(work.scale_log2);
    stream_tiles(state, work, exchange.q);
    store_states(exchange, state, work.heads);
    __syncthreads();
}

// The block's state of one of its query heads, columns 4 column ... +3, from what its warps stored.
__device__ __forceinline__ Piece block_state(const Exchange& exchange, float scale, int kv, int h, int heads, int column) {
    return merge_pieces<SLOTS>(scale, 0, SLOTS, 1, [&](int slot) -> Piece {
        const int row = (slot * KV_HEADS + kv) * heads + h;
        const float2 sums = exchange.sums[row];
        return {sums.x, sums.y, exchange.rows[row * (COLUMNS + 1) + column]};
    });
}

// o and lse of one request: o[head, d], lse[head].
struct Output {
    OUT* o;
    float* lse;
    long long o_head_stride, lse_head_stride;
    bool natural;

    __device__ void write(const Piece& piece, float scale, int head, int column) const {
        const Softmax state = {scale, piece.m, piece.l};
        const float acc[4] = {piece.acc.x, piece.acc.y, piece.acc.z, piece.acc.w};
        #pragma unroll
        for (int i = 0; i < 4; i++) o[head * o_head_stride + 4 * column + i] = from_float<OUT>(state.normalised(acc[i]));
        if (column == 0) lse[head * lse_head_stride] = state.scaled_lse(natural);
    }
};
