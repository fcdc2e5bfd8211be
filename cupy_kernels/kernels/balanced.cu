// Decode in one launch: the tokens of all requests, laid end to end, are cut into equal shares; one block computes one share for
// KV_HEADS KV heads and writes o where a request is its own, or a piece of a state; the last to finish a request merges its pieces.
//
// Grid: (head_chunks, num_kv_heads / KV_HEADS, shares), 32 WARPS threads. A chunk is some of the query heads of one KV head. The blocks
// of a share, its columns, lie side by side and read the same pages at about the same time.
// The cut is computed here, from context_lens, in units of whole pages: no plan on the host, and a captured graph serves any lengths.
// Bits do not depend on which block comes last: pieces are merged in the order of the shares.
//
// Constants: KV (q, K, V), OUT (o), HEAD_DIM, N_TILES, P_PARTS, WHOLE_TILES, WARPS, KV_HEADS, BLOCKS_PER_SM.
#include "stream.cuh"
#include "cut.cuh"

// Where the pieces of unfinished requests lie. A block leaves at most two: of the request its share begins in, and of the one it
// ends in.
struct Workspace {
    float4* rows;        // [shares, columns, 2, block_heads, COLUMNS]: the undivided o
    float2* sums;        // [shares, columns, 2, block_heads]: m, l
    int columns, column, block_heads;

    // The one formula for the place of a piece.
    __device__ long long row(int share, bool second, int head) const {
        return (((long long)share * columns + column) * 2 + second) * block_heads + head;
    }
    __device__ void write(long long row, int c, const Piece& piece) const {
        __stcg(rows + row * COLUMNS + c, piece.acc);
        if (c == 0) __stcg(sums + row, make_float2(piece.m, piece.l));
    }
    __device__ Piece read(long long row, int c) const {
        const float2 x = __ldcg(sums + row);
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

// Merges all pieces of a request; with few columns to merge, several threads take a part of the pieces of each.
__device__ __forceinline__ void merge_request(const Workspace& workspace, const Row& row, const Exchange& exchange, float scale,
                                              int heads, int group_size, const Output& output) {
    const int items = KV_HEADS * heads * COLUMNS, ways = max(1, THREADS / items);
    #pragma unroll 1
    for (int i = threadIdx.x; i < items * ways; i += THREADS) {
        const int head = i % items / COLUMNS, c = i % items % COLUMNS;
        const Piece piece = merge_pieces<MERGE_BATCH>(scale, i / items, row.pieces, ways, [&](int p) {
            return workspace.read(workspace.row(row.first_share + p, p == 0 && row.second_in_first, head), c);
        });
        exchange.sums[i] = make_float2(piece.m, piece.l);
        exchange.rows[i] = piece.acc;
    }
    __syncthreads();
    #pragma unroll 1
    for (int i = threadIdx.x; i < items; i += THREADS) {
        const Piece piece = merge_pieces<2>(scale, i, i + items * ways, items, [&](int j) -> Piece {
            return {exchange.sums[j].x, exchange.sums[j].y, exchange.rows[j]};
        });
        const int head = i / COLUMNS;
        output.write(piece, scale, head / heads * group_size + head % heads, i % COLUMNS);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) balanced(
    const KV* __restrict__ q,              // [batch_size, num_q_heads, head_dim] by its strides, rows aligned to 16 bytes
    const KV* __restrict__ k_cache,        // [pool_pages, page_size, num_kv_heads, head_dim] by its strides, rows aligned likewise
    const KV* __restrict__ v_cache,        // as k_cache, with strides of its own
    const int* __restrict__ page_table,    // [batch_size, max_pages]
    const int* __restrict__ context_lens,  // [batch_size]
    OUT* __restrict__ o,                   // [batch_size, num_q_heads, head_dim] by its strides
    float* __restrict__ lse,               // [batch_size, num_q_heads] by its strides
    float* o_pieces,                       // [shares, columns, 2, heads of a block, head_dim], undivided; no initial values needed
    float* sum_pieces,                     // [shares, columns, 2, heads of a block, 2]: m, l
    unsigned* counters,                    // [batch_size, columns], zeros; they are zeros again afterwards
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
    const int kv_head = blockIdx.y * KV_HEADS, first_head = kv_head * group_size + blockIdx.x * chunk_heads, share = blockIdx.z;
    const int heads = min(chunk_heads, (int)(group_size - blockIdx.x * chunk_heads)), items = KV_HEADS * heads * COLUMNS;
    const int columns = gridDim.x * gridDim.y, column = blockIdx.y * gridDim.x + blockIdx.x;
    const float scale = fabsf(scale_log2);

    DYNAMIC_SHARED(float4, shared);
    __shared__ Share mine;
    __shared__ bool is_last;
    const Exchange exchange = exchange_at(shared, chunk_heads);
    const Workspace workspace = {
        reinterpret_cast<float4*>(o_pieces), reinterpret_cast<float2*>(sum_pieces), columns, column, KV_HEADS * chunk_heads};
    const auto output = [&](int request) -> Output {
        return {o + request * o_batch_stride + first_head * o_head_stride,
                lse + request * lse_batch_stride + first_head * lse_head_stride, o_head_stride, lse_head_stride, natural != 0};
    };

    const Batch batch = {context_lens, context_lens_stride, batch_size, max_pages, page_size, unit_tokens};
    cut_batch(mine, batch, share, gridDim.z, min_units);
    // `mine` lies in shared memory and is read where it is needed: registers are scarce while tiles stream.
    for (bool more = mine.begin < mine.end; more;) {
        const int skipped = mine.begin - mine.row_begin;
        const long long tokens = (mine.end - mine.row_begin) * (long long)unit_tokens;
        const Work work = {
            {page_table + mine.request * page_table_stride, page_size},
            {skipped * unit_tokens, (int)min((long long)batch.length(mine.request), tokens)},
            q + mine.request * q_batch_stride + first_head * q_head_stride,
            {k_cache + kv_head * k_head_stride, k_page_stride, k_slot_stride},
            {v_cache + kv_head * v_head_stride, v_page_stride, v_slot_stride},
            q_head_stride, k_head_stride, v_head_stride, group_size, heads, scale_log2};
        attend(work, exchange);

        const int request = mine.request, row_end = mine.row_begin + batch.units(request);
        const Row row = row_of(mine.row_begin, row_end, mine.per_share);
        #pragma unroll 1
        for (int i = threadIdx.x; i < items; i += THREADS) {
            const int head = i / COLUMNS, c = i % COLUMNS, kv = head / heads, h = head % heads;
            const Piece piece = block_state(exchange, scale, kv, h, heads, c);
            if (row.pieces == 1) {
                output(request).write(piece, scale, kv * group_size + h, c);
            } else {
                workspace.write(workspace.row(share, share == row.first_share && row.second_in_first, head), c, piece);
            }
        }
        if (row.pieces > 1) {
            __syncthreads();
            if (threadIdx.x == 0) {
                unsigned* counter = counters + (long long)request * columns + column;
                is_last = add_acquire_release(counter, 1) + 1 == row.pieces;
                if (is_last) *counter = 0;
            }
            __syncthreads();
            if (is_last) merge_request(workspace, row, exchange, scale, heads, group_size, output(request));
        }
        more = row_end < mine.end;
        if (more) {
            __syncthreads();
            if (threadIdx.x == 0) next_request(mine, batch);
            __syncthreads();
        }
    }
    // Requests without tokens are in nobody's share.
    #pragma unroll 1
    for (int request = share; request < batch_size; request += gridDim.z)
        #pragma unroll 1
        for (int i = threadIdx.x; i < items && batch.length(request) == 0; i += THREADS)
            output(request).write(EMPTY_PIECE, scale, i / COLUMNS / heads * group_size + i / COLUMNS % heads, i % COLUMNS);
}
