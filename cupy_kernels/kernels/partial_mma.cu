// Pass 1 on tensor cores: one block computes the attention state of one split for the query heads of one KV head.
//
// grid.x = batch_size, grid.y = num_kv_heads * head_chunks, grid.z = num_splits; 32 WARPS threads. Pages, tokens and outputs as in
// partial.cu, the work inside as in balanced.cu.
//
// Constants: KV (q, K, V), OUT (stored o), HEAD_DIM, N_TILES, P_PARTS, WHOLE_TILES, WARPS, BLOCKS_PER_SM.
#define PACED 0
#include "stream.cuh"

struct NoMoreSpans {
    __device__ bool next(Span&) { return false; }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) partial_mma(
    const KV* __restrict__ q,              // [batch_size, num_q_heads, head_dim] by its strides, rows aligned to 16 bytes
    const KV* __restrict__ k_cache,        // [pool_pages, page_size, num_kv_heads, head_dim] by its strides, rows aligned likewise
    const KV* __restrict__ v_cache,        // as k_cache, with strides of its own
    const int* __restrict__ page_table,    // [batch_size, max_pages]
    const int* __restrict__ context_lens,  // [batch_size]
    OUT* __restrict__ o,                   // [batch_size, num_q_heads, num_splits, head_dim] by its strides
    float* __restrict__ lse,               // [batch_size, num_q_heads, num_splits] by its strides
    int group_size,
    int head_chunks,
    int chunk_heads,                       // of a full chunk
    int page_size,
    long long page_divider,                // n / page_size: see Divider
    int max_pages,
    int num_splits,
    int pages_per_split,                   // 0: ceil(pages / num_splits)
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
    long long o_split_stride,
    long long lse_batch_stride,
    long long lse_head_stride,
    long long lse_split_stride) {
    const int request = blockIdx.x, kv_head = blockIdx.y / head_chunks, chunk = blockIdx.y % head_chunks, split = blockIdx.z;
    const int first_head = kv_head * group_size + chunk * chunk_heads, heads = min(chunk_heads, group_size - chunk * chunk_heads);
    wait_for_previous_launch();
    const int length = covered_length(context_lens[request * context_lens_stride], most_tokens(max_pages, page_size));

    DYNAMIC_SHARED(float4, shared);
    // By the heads of a full chunk, which need no register: by this block's own, NVRTC 13.0 spills on sm_90.
    const Exchange exchange = exchange_at(shared, chunk_heads);
    const Heads q_heads = {q + request * q_batch_stride + first_head * q_head_stride, q_head_stride, heads};
    const Range tokens = split_tokens(length, page_size, split, num_splits, pages_per_split);
    const float scale = fabsf(scale_log2);
    Feed<NoMoreSpans> feed = {
        {}, {k_cache + kv_head * k_head_stride, k_page_stride, k_slot_stride},
        {v_cache + kv_head * v_head_stride, v_page_stride, v_slot_stride}, page_size, Divider(page_divider)};
    ask_for_q<THREADS>(exchange.q, q_heads);
    feed.find_first({page_table + request * page_table_stride, tokens});
    feed.load_first();
    take_q<THREADS>(exchange.q, scale_log2);
    __syncthreads();
    Pace pace = {};
    attend(feed, tokens, exchange.q, scale, heads, exchange, pace);
    __syncthreads();
    let_next_launch_begin();

    // o[request, head, split, :] and lse[request, head, split]; an empty split writes (0, -inf) through the same lines.
    const Output output = {
        o + request * o_batch_stride + first_head * o_head_stride + split * o_split_stride,
        lse + request * lse_batch_stride + first_head * lse_head_stride + split * lse_split_stride,
        o_head_stride, lse_head_stride, natural != 0};
    for (int i = threadIdx.x; i < heads * COLUMNS; i += THREADS)
        output.write(block_state(exchange, scale, i / COLUMNS, heads, i % COLUMNS), scale, i / COLUMNS, i % COLUMNS);
}
