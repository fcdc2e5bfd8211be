// Decode in one launch: the tokens of all requests, laid end to end, are cut into equal shares; one block computes one share for
// one KV head and writes o where a request is its own, or a piece of a state; the last to finish a request merges its pieces.
//
// Grid: (head_chunks, num_kv_heads, shares), 32 WARPS threads. A chunk is some of the query heads of one KV head. The blocks of a
// share, its columns, lie side by side and read the same pages at about the same time.
// The cut is computed here, from context_lens, in units of whole pages: no plan on the host, and a captured graph serves any lengths.
// Bits do not depend on which block comes last: pieces are merged in the order of the shares.
//
// Constants: KV (q, K, V), OUT (o), HEAD_DIM, N_TILES, P_PARTS, WHOLE_TILES, WARPS, BLOCKS_PER_SM.
#include "stream.cuh"
#include "cut.cuh"

// Where the pieces of unfinished requests lie. A block leaves at most two: of the request its share begins in, and of the one it
// ends in. Warps that have columns of the same head keep a copy of its sums each: a warp reads only what the same warps of other
// blocks wrote.
struct Workspace {
    float4* rows;        // [shares, columns, 2, block_heads, COLUMNS]: the undivided o
    float2* sums;        // [shares, columns, 2, block_heads, WARPS]: m, l
    int columns, column, block_heads;

    // The one formula for the place of a piece.
    __device__ long long row(int share, bool second, int head) const {
        return (((long long)share * columns + column) * 2 + second) * block_heads + head;
    }
    __device__ void write(long long row, int c, const Piece& piece) const {
        __stcg(rows + row * COLUMNS + c, piece.acc);
        __stcg(sums + row * WARPS + threadIdx.x / 32, make_float2(piece.m, piece.l));
    }
    __device__ Piece read(long long row, int c) const {
        const float2 x = __ldcg(sums + row * WARPS + threadIdx.x / 32);
        return {x.x, x.y, __ldcg(rows + row * COLUMNS + c)};
    }
};

// The shares a request lies in, and which of the first one's pieces is its own: the second, if that share began with another request.
struct Row {
    int first_share, pieces;
    bool second_in_first;
};
__device__ __forceinline__ Row row_of(int row_begin, int row_end, int per_share) {
    const int first = row_begin / per_share;
    return {first, (row_end - 1) / per_share - first + 1, row_begin > first * per_share};
}

// The columns of a block's heads, four at a time, as they are dealt out to its warps. Each warp's part is counted and merged by itself.
struct Deal {
    int first, count, width;  // items of this warp; lanes that take one each, a power of two

    __device__ explicit Deal(int items) {
        const int each = (items + WARPS - 1) / WARPS, warp = threadIdx.x / 32;
        first = warp * each, count = max(0, min(each, items - first));
        for (width = 1; width < each && width < 32;) width *= 2;
    }
};

// Merges all pieces of a warp's part of a request. The lanes that have no item of their own share the pieces of the others.
__device__ __forceinline__ void merge_request(
    const Workspace& workspace, const Row& row, const Deal& deal, float scale, const Output& output) {
    const int lane = lane_index();
    #pragma unroll 1
    for (int i = lane % deal.width; i - lane % deal.width < deal.count; i += deal.width) {
        const int head = (deal.first + i) / COLUMNS, c = (deal.first + i) % COLUMNS;
        const int pieces = i < deal.count ? row.pieces : 0;
        Piece piece = merge_pieces<MERGE_BATCH>(scale, lane / deal.width, pieces, 32 / deal.width, [&](int p) {
            return workspace.read(workspace.row(row.first_share + p, p == 0 && row.second_in_first, head), c);
        });
        #pragma unroll 1
        for (int step = deal.width; step < 32; step *= 2) {
            const auto from_other = [&](float x) { return __shfl_xor_sync(0xffffffffu, x, step); };
            const float m = from_other(piece.m), l = from_other(piece.l);
            const float x = from_other(piece.acc.x), y = from_other(piece.acc.y);
            const float z = from_other(piece.acc.z), w = from_other(piece.acc.w);
            const Piece other = {m, l, make_float4(x, y, z, w)};
            piece = merge_pieces<2>(scale, 0, 2, 1, [&](int j) { return j == 0 ? piece : other; });
        }
        if (lane < deal.width && i < deal.count) output.write(piece, scale, head, c);
    }
}

// A warp's way through the parts of a share.
struct Spans {
    Share* left;  // in shared memory, this warp's own
    const Batch& batch;
    const int* page_table;
    long long page_table_stride;

    __device__ bool next(Span& span) {
        Share share = *left;
        const Part part = next_part(share, batch);
        __syncwarp();
        *left = share;
        __syncwarp();
        if (part.request >= 0) span = {{page_table + part.request * page_table_stride, batch.page_size}, part.tokens};
        return part.request >= 0;
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) balanced(
    const KV* __restrict__ q,              // [batch_size, num_q_heads, head_dim] by its strides, rows aligned to 16 bytes
    const KV* __restrict__ k_cache,        // [pool_pages, page_size, num_kv_heads, head_dim] by its strides, rows aligned likewise
    const KV* __restrict__ v_cache,        // as k_cache, with strides of its own
    const int* __restrict__ page_table,    // [batch_size, max_pages]
    const int* __restrict__ context_lens,  // [batch_size]
    OUT* __restrict__ o,                   // [batch_size, num_q_heads, head_dim] by its strides
    float* __restrict__ lse,               // [batch_size, num_q_heads] by its strides
    float* o_pieces,                       // [shares, columns, 2, heads of a block, head_dim], undivided; no initial values needed
    float* sum_pieces,                     // [shares, columns, 2, heads of a block, WARPS, 2]: m, l
    unsigned* counters,                    // [batch_size, columns, WARPS], zeros; they are zeros again afterwards
    int batch_size,
    int group_size,
    int chunk_heads,                       // query heads of a chunk; the last one may have fewer
    int page_size,
    int max_pages,
    int unit_tokens,                       // the least multiple of page_size that fills a tile
    int min_units,                         // of a share: a batch too small to fill the device is cut into fewer shares
    float scale_log2,                      // sm_scale * log2(e), not 0
    int natural,                           // lse in natural logarithms, or else in base 2
    long long q_batch_stride,              // all strides in elements
    long long q_head_stride,
    long long k_page_stride,
    int k_slot_stride,
    long long k_head_stride,
    long long v_page_stride,
    int v_slot_stride,
    long long v_head_stride,
    long long page_table_stride,
    long long context_lens_stride,
    long long o_batch_stride,
    long long o_head_stride,
    long long lse_batch_stride,
    long long lse_head_stride) {
    const int kv_head = blockIdx.y, first_head = kv_head * group_size + blockIdx.x * chunk_heads, share = blockIdx.z;
    const int heads = min(chunk_heads, (int)(group_size - blockIdx.x * chunk_heads)), items = heads * COLUMNS;
    const int columns = gridDim.x * gridDim.y, column = blockIdx.y * gridDim.x + blockIdx.x;
    const float scale = fabsf(scale_log2);

    DYNAMIC_SHARED(float4, shared);
    // In shared memory, as registers are scarce while tiles stream: what is left of the share for the
    // block and for each warp's loads, this turn's part of a request, the next.
    __shared__ Share left, ahead[WARPS];
    __shared__ Part parts[2];
    const Exchange exchange = exchange_at(shared, chunk_heads);
    const auto q_of = [&](int request) -> Heads {
        return {q + request * q_batch_stride + first_head * q_head_stride, q_head_stride, heads, scale_log2};
    };
    const auto output = [&](int request) -> Output {
        return {o + request * o_batch_stride + first_head * o_head_stride,
                lse + request * lse_batch_stride + first_head * lse_head_stride, o_head_stride, lse_head_stride, natural != 0};
    };

    const Batch batch = {context_lens, context_lens_stride, batch_size, max_pages, page_size, unit_tokens};
    cut_batch(left, batch, share, gridDim.z, min_units);
    const int per_share = left.per_share;
    Feed<Spans> feed = {
        {ahead + threadIdx.x / 32, batch, page_table, page_table_stride},
        {k_cache + kv_head * k_head_stride, k_page_stride, k_slot_stride},
        {v_cache + kv_head * v_head_stride, v_page_stride, v_slot_stride}};
    ahead[threadIdx.x / 32] = left;
    __syncwarp();
    QPart q_part = {};
    if (left.begin < left.end) q_part = load_q(q_of(left.request));
    feed.start();
    __syncthreads();
    if (threadIdx.x == 0) parts[0] = next_part(left, batch);
    for (int turn = 0;; turn ^= 1) {
        store_q(exchange.q, q_part);
        __syncthreads();
        if (parts[turn].request < 0) break;
        if (threadIdx.x == 0) parts[turn ^ 1] = next_part(left, batch);
        attend(feed, parts[turn].tokens, scale, heads, exchange);
        __syncthreads();
        if (parts[turn ^ 1].request >= 0) q_part = load_q(q_of(parts[turn ^ 1].request));

        const int request = parts[turn].request;
        const Row row = row_of(parts[turn].row_begin, parts[turn].row_end, per_share);
        const Workspace workspace = {
            reinterpret_cast<float4*>(o_pieces), reinterpret_cast<float2*>(sum_pieces), columns, column, chunk_heads};
        const Deal deal(items);
        #pragma unroll 1
        for (int i = deal.first + lane_index(); i < deal.first + deal.count; i += 32) {
            const int head = i / COLUMNS, c = i % COLUMNS;
            const Piece piece = block_state(exchange, scale, head, heads, c);
            if (row.pieces == 1) {
                output(request).write(piece, scale, head, c);
            } else {
                workspace.write(workspace.row(share, share == row.first_share && row.second_in_first, head), c, piece);
            }
        }
        if (row.pieces == 1 || deal.count == 0) continue;
        __syncwarp();
        unsigned before = 0, *counter = counters + ((long long)request * columns + column) * WARPS + threadIdx.x / 32;
        if (lane_index() == 0) before = add_acquire_release(counter, 1);
        before = __shfl_sync(0xffffffffu, before, 0);
        if (before + 1 == row.pieces) {
            if (lane_index() == 0) *counter = 0;
            merge_request(workspace, row, deal, scale, output(request));
        }
    }
    // Requests without tokens are in nobody's share.
    #pragma unroll 1
    for (int request = share; request < batch_size; request += gridDim.z)
        #pragma unroll 1
        for (int i = threadIdx.x; i < items && batch.length(request) == 0; i += THREADS)
            output(request).write(EMPTY_PIECE, scale, i / COLUMNS, i % COLUMNS);
}
