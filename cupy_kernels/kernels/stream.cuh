// What one block does with a range of tokens: its warps stream tiles of 16, then their states meet in shared memory.
//
// A block works for one KV head and up to N_HEADS of its query heads; warp w has every WARPS-th tile from the w-th on.
//
// Constants: those of tile.cuh, WARPS, PACED. Dynamic shared memory: see Exchange.
#include "tile.cuh"
#include "pieces.cuh"
#include "pace.cuh"

#define THREADS (32 * WARPS)
// Tiles that each warp asks for into L2 while the launch in front still runs. More gain nothing: bench/NOTES.md.
#define TILES_AHEAD 2
static_assert(WARPS <= 32, "a block has at most 1024 threads");

// The query heads of a block in one request.
struct Heads {
    const KV* q;  // of the first
    long long stride;
    int count;
};

// q of a block's heads, on its way to [N_HEADS][Q_STRIDE] in shared memory. Of BY threads, all of the block or a warp, each sees to its
// own 16 bytes at a time. Heads of padding are 0: what stood there, NaN say, would have maxima raised in every tile.
#define Q_PIECES (HEAD_DIM / 8)
template <int BY, class F> __device__ __forceinline__ void for_each_piece_of_q(F f) {
    constexpr int PIECES = N_HEADS * Q_PIECES;
    #pragma unroll
    for (int j = 0; j * BY < PIECES; j++) {
        const int i = threadIdx.x % BY + j * BY;
        if (PIECES % BY == 0 || i < PIECES) f(i / Q_PIECES, i % Q_PIECES * 8);
    }
}
template <int BY> __device__ __forceinline__ void ask_for_q(KV* q_shared, const Heads& heads) {
    for_each_piece_of_q<BY>([&](int head, int column) {
        KV* to = q_shared + head * Q_STRIDE + column;
        if (head < heads.count) copy_async_16(to, heads.q + head * heads.stride + column);
        else *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    });
    commit_copies();
}
// Waits for it; then the block has to meet. A negative scale is taken into q, so that the largest product is the largest score.
template <int BY> __device__ __forceinline__ void take_q(KV* q_shared, float scale_log2) {
    wait_for_committed_copies();
    if (scale_log2 >= 0.f) return;
    for_each_piece_of_q<BY>([&](int head, int column) {
        uint4& x = *reinterpret_cast<uint4*>(q_shared + head * Q_STRIDE + column);
        x = make_uint4(x.x ^ 0x80008000u, x.y ^ 0x80008000u, x.z ^ 0x80008000u, x.w ^ 0x80008000u);
    });
}

// Shared memory: an area for each warp, its slot while tiles stream and rows of [heads][HEAD_DIM] when states meet, padded by 16 bytes
// to spread over the banks; q of a request and of the next one; [WARPS][heads] sums.
struct Exchange {
    char* areas;
    int area_bytes;
    KV* q;  // [2][N_HEADS][Q_STRIDE]
    float2* sums;

    __device__ char* area(int warp) const { return areas + warp * area_bytes; }
    __device__ float4* row(int warp, int head) const { return reinterpret_cast<float4*>(area(warp)) + head * (HEAD_DIM / 4 + 1); }
    __device__ KV* q_of_turn(int turn) const { return q + turn * (N_HEADS * Q_STRIDE); }
};
__device__ __forceinline__ Exchange exchange_at(float4* shared, int heads) {
    const int area_bytes = max(SLOT_BYTES, 16 * heads * (HEAD_DIM / 4 + 1));
    float4* q = shared + WARPS * area_bytes / 16;
    return {reinterpret_cast<char*>(shared), area_bytes, reinterpret_cast<KV*>(q),
            reinterpret_cast<float2*>(q + 2 * N_HEADS * Q_STRIDE / 8)};
}

// Some tokens of one request, and its row of the page table.
struct Span { const int* page_table; Range tokens; };

// A warp's tiles in the order it computes them, span after span as `Spans` names them: `bool next(Span&)`. Loads run a tile ahead,
// into the next spans too: the end of a request does not interrupt the stream.
template <class Spans> struct Feed {
    Spans spans;
    Cache k, v;
    int page_size;
    Divider by_page;
    Span span;  // of the next tile, which begins at token `first`; there is none if first >= span.tokens.end
    int first;
    Place place;
    Rows k_rows, v_rows;

    __device__ void advance(int to) {
        first = to;
        while (first >= span.tokens.end && spans.next(span)) first = span.tokens.begin + threadIdx.x / 32 * TILE;
        if (first < span.tokens.end) place = place_of(span.page_table, page_size, by_page, first, span.tokens.end, lane_index());
    }
    // Without a tile, zeros: what the registers held would have to be kept otherwise.
    __device__ void load_k() {
        if (first < span.tokens.end) load_rows(k_rows, k, place, span.tokens.end - 1 - first, lane_index());
        else k_rows = {};
    }
    // The last of a tile, then its successor's page id is asked for.
    __device__ void load_v() {
        if (first < span.tokens.end) {
            load_rows(v_rows, v, place, span.tokens.end - 1 - first, lane_index());
            advance(first + WARPS * TILE);
        } else {
            v_rows = {};
        }
    }
    // The warp's first tile: in this span, or in one that follows.
    __device__ void find_first(const Span& first_span) {
        span = first_span;
        place = {};
        advance(span.tokens.begin + threadIdx.x / 32 * TILE);
    }
    __device__ void load_first() {
        load_k();
        if (TOGETHER) load_v();
    }
    // The place of the tile as the page table has it now.
    __device__ Place place_now() const {
        if (first >= span.tokens.end) return place;
        return place_of(span.page_table, page_size, by_page, first, span.tokens.end, lane_index());
    }
    // Asks for the warp's first tiles of its span into L2: lanes 0 to 15 for a row of K each, the others of V.
    __device__ void prefetch_first(int pool_pages) const {
        const bool is_k = lane_index() < TILE;
        const KV* base = is_k ? k.base : v.base;
        const long long page_stride = is_k ? k.page_stride : v.page_stride;
        const int slot_stride = is_k ? k.slot_stride : v.slot_stride;
        int token[TILES_AHEAD], page[TILES_AHEAD];
        #pragma unroll
        for (int i = 0; i < TILES_AHEAD; i++) {
            token[i] = first + i * WARPS * TILE + lane_index() % TILE;
            if (token[i] < span.tokens.end) page[i] = load_relaxed(span.page_table + by_page.quotient(token[i]));
        }
        #pragma unroll
        for (int i = 0; i < TILES_AHEAD; i++) {
            const long long slot = token[i] - by_page.quotient(token[i]) * page_size;
            if (token[i] < span.tokens.end)
                prefetch(base + inside_pool(page[i], pool_pages) * page_stride + slot * slot_stride, 2 * HEAD_DIM);
        }
    }
};

template <class Spans>
__device__ __forceinline__ void stream_tiles(
    WarpState& state, Feed<Spans>& feed, const Range& tokens, const KV* q, const Exchange& exchange, Pace& pace) {
    const int lane = lane_index();
    char* slot = exchange.area(threadIdx.x / 32);
    #pragma unroll 1
    for (int first = tokens.begin + threadIdx.x / 32 * TILE; first < tokens.end; first += WARPS * TILE) {
        // As soon as a tile is in shared memory, the next one is on its way into the registers.
        store_rows<false>(slot, feed.k_rows, lane);
        if (TOGETHER) store_rows<true>(slot, feed.v_rows, lane);
        pace.hold_back();
        if (TOGETHER) feed.load_k();
        feed.load_v();
        pace.count_row();
        __syncwarp();
        float s[N_TILES][4];
        dots(s, slot, q, lane);
        if (first + TILE > tokens.end) hide_rows(s, tokens.end - 1 - first, lane);
        unsigned p[N_TILES][P_PARTS][2];
        weigh(p, state, s);
        if (!TOGETHER) {
            __syncwarp();
            store_rows<true>(slot, feed.v_rows, lane);
            if (!LATE_K) feed.load_k();
            __syncwarp();
        }
        accumulate(state, slot, p, lane);
        pace.compare();
        if (LATE_K) feed.load_k();
        __syncwarp();
    }
}

__device__ __forceinline__ void store_states(const Exchange& exchange, WarpState& state, int heads) {
    const int lane = lane_index(), warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    constexpr float UNFOLD = 1.f / Format::FOLD;
    // Of all heads at once, as each sum waits for three exchanges.
    float sums[N_TILES][2];
    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int h = 0; h < 2; h++) sums[n][h] = state.heads[n][h].l * UNFOLD;
    #pragma unroll
    for (int step = 4; step < 32; step *= 2)
        #pragma unroll
        for (int n = 0; n < N_TILES; n++)
            #pragma unroll
            for (int h = 0; h < 2; h++) sums[n][h] += __shfl_xor_sync(0xffffffffu, sums[n][h], step);
    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int head = 8 * n + 2 * t + h;
            if (head >= heads) continue;
            if (g == 0) exchange.sums[warp * heads + head] = make_float2(state.heads[n][h].m, sums[n][h]);
            float* row = reinterpret_cast<float*>(exchange.row(warp, head));
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

// The state of the block's query heads over the range of tokens, which `feed` has come to; it is left in `exchange`.
template <class Spans>
__device__ __forceinline__ void attend(
    Feed<Spans>& feed, const Range& tokens, const KV* q, float scale, int heads, const Exchange& exchange, Pace& pace) {
    WarpState state = {};
    #pragma unroll
    for (int n = 0; n < N_TILES; n++)
        #pragma unroll
        for (int h = 0; h < 2; h++) state.heads[n][h].log2_per_unit = scale;
    stream_tiles(state, feed, tokens, q, exchange, pace);
    store_states(exchange, state, heads);
}

// The block's piece of one of its query heads, from what its warps stored: of all at once, where registers hold so many.
__device__ __forceinline__ Piece block_state(const Exchange& exchange, float scale, int head, int heads, int c) {
    return merge_pieces<WARPS <= 8 ? WARPS : 4>(scale, WARPS, [&](int warp) {
        const float2 sums = exchange.sums[warp * heads + head];
        Piece piece = {sums.x, sums.y};
        #pragma unroll
        for (int v = 0; v < PIECE_VECTORS; v++) piece.acc[v] = exchange.row(warp, head)[c + v * COLUMNS];
        return piece;
    });
}
