// Pass 1, the readable form: one block computes the attention state of one split for the query heads of one KV head.
//
// grid.x = batch_size, grid.y = num_kv_heads * head_chunks, grid.z = num_splits; THREADS threads.
// A chunk is up to 16 query heads of one KV head, so that K and V are read once for all of them.
// With num_splits = 1 the state is the result: the caller passes the outputs themselves, and no merge follows.
//
// Constants: KV (q, K and V: float, __half, __nv_bfloat16), OUT (stored o), THREADS.
// Dynamic shared memory, floats: q [heads][head_dim], acc [heads][head_dim], tile [TILE][head_dim + 1].
#include "types.cuh"
#include "ptx.cuh"
#include "state.cuh"
#include "warp.cuh"
#include "pages.cuh"

#define TILE 32
#define MAX_HEADS 16
static_assert(THREADS % TILE == 0, "one warp computes the scores of one query head with a tile: a lane a token");

// Tokens [first, first + TILE) of one KV head into shared memory, a warp a token. Those past `end` become 0 without being read:
// they may hold NaN, and their page may not exist.
__device__ void load_tile(float* tile, const KV* cache, const PagedRow& pages, int first, int end, int head_dim,
                          long long page_stride, long long slot_stride) {
    for (int t = threadIdx.x / TILE; t < TILE; t += THREADS / TILE) {
        const int token = first + t;
        // cache[page_table[token / page_size], token % page_size, kv_head, :]
        const KV* row = token < end ? cache + pages.offset(token, page_stride, slot_stride) : nullptr;
        for (int d = threadIdx.x % TILE; d < head_dim; d += TILE)
            tile[t * (head_dim + 1) + d] = token < end ? to_float(row[d]) : 0.f;
    }
}

// q . k, in chunks of 8: rounding grows with 8 + head_dim / 8 instead of head_dim.
__device__ float dot(const float* q, const float* k, int head_dim) {
    float sum = 0.f;
    for (int d = 0; d < head_dim; d += 8) {
        float chunk = 0.f;
        for (int i = 0; i < 8; i++) chunk = fmaf(q[d + i], k[d + i], chunk);
        sum += chunk;
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) partial(
    const KV* __restrict__ q,              // [batch_size, num_q_heads, head_dim]
    const KV* __restrict__ k_cache,        // [pool_pages, page_size, num_kv_heads, head_dim] by its strides
    const KV* __restrict__ v_cache,        // as k_cache, with strides of its own
    const int* __restrict__ page_table,    // [batch_size, max_pages]
    const int* __restrict__ context_lens,  // [batch_size]
    OUT* __restrict__ o,                   // [batch_size, num_q_heads, num_splits, head_dim] by its strides
    float* __restrict__ lse,               // [batch_size, num_q_heads, num_splits] by its strides
    int group_size,
    int head_chunks,
    int head_dim,
    int page_size,
    int max_pages,
    int num_splits,
    int pages_per_split,                   // 0: ceil(pages / num_splits)
    int window,                            // keys [length - window, length) are visible; 0: all
    float scale_log2,                      // sm_scale * log2(e)
    int natural,                           // lse in natural logarithms, or else in base 2
    long long q_batch_stride,              // all strides in elements
    long long q_head_stride,
    long long k_page_stride,
    long long k_slot_stride,
    long long k_head_stride,
    long long v_page_stride,
    long long v_slot_stride,
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
    const int first_head = kv_head * group_size + chunk * MAX_HEADS;
    const int heads = min(MAX_HEADS, group_size - chunk * MAX_HEADS);
    const int lane = threadIdx.x % TILE, warp = threadIdx.x / TILE;

    DYNAMIC_SHARED(float, shared);
    float* q_tile = shared;
    float* acc = q_tile + heads * head_dim;
    float* tile = acc + heads * head_dim;
    __shared__ float m[MAX_HEADS], l[MAX_HEADS], alpha[MAX_HEADS], p[MAX_HEADS][TILE];

    wait_for_previous_launch();
    for (int i = threadIdx.x; i < heads * head_dim; i += THREADS) {
        q_tile[i] = to_float(q[request * q_batch_stride + (first_head + i / head_dim) * q_head_stride + i % head_dim]);
        acc[i] = 0.f;
    }
    if (threadIdx.x < heads) {
        m[threadIdx.x] = NEG_INF;
        l[threadIdx.x] = 0.f;
    }

    const PagedRow pages = {page_table + request * page_table_stride, page_size};
    const int length = covered_length(context_lens[request * context_lens_stride], most_tokens(max_pages, page_size));
    const Range tokens = visible_tokens(
        split_tokens(length, page_size, split, num_splits, pages_per_split), length, window);

    for (int first = tokens.begin; first < tokens.end; first += TILE) {
        __syncthreads();
        load_tile(tile, k_cache + kv_head * k_head_stride, pages, first, tokens.end, head_dim, k_page_stride, k_slot_stride);
        __syncthreads();
        for (int h = warp; h < heads; h += THREADS / TILE) {
            const float score = first + lane < tokens.end
                ? dot(q_tile + h * head_dim, tile + lane * (head_dim + 1), head_dim) * scale_log2 : NEG_INF;
            Softmax state = {1.f, m[h], l[h]};
            const float rescale = state.raise(warp_max(score));
            p[h][lane] = state.weight(score);
            state.l += warp_sum(p[h][lane]);
            if (lane == 0) {
                m[h] = state.m;
                l[h] = state.l;
                alpha[h] = rescale;
            }
        }
        __syncthreads();
        load_tile(tile, v_cache + kv_head * v_head_stride, pages, first, tokens.end, head_dim, v_page_stride, v_slot_stride);
        __syncthreads();
        for (int i = threadIdx.x; i < heads * head_dim; i += THREADS) {
            const int h = i / head_dim, d = i % head_dim;
            // The tile's sum starts from zero: rounding grows with TILE + tiles instead of tokens.
            float sum = 0.f;
            for (int t = 0; t < TILE; t++) sum = fmaf(p[h][t], tile[t * (head_dim + 1) + d], sum);
            acc[i] = fmaf(acc[i], alpha[h], sum);
        }
    }
    __syncthreads();
    let_next_launch_begin();

    // o[request, head, split, :] and lse[request, head, split]; an empty split writes (0, -inf) through the same lines.
    for (int i = threadIdx.x; i < heads * head_dim; i += THREADS) {
        const int h = i / head_dim, d = i % head_dim;
        o[request * o_batch_stride + (first_head + h) * o_head_stride + split * o_split_stride + d] =
            from_float<OUT>(Softmax{1.f, m[h], l[h]}.normalised(acc[i]));
    }
    if (threadIdx.x < heads) {
        const Softmax state = {1.f, m[threadIdx.x], l[threadIdx.x]};
        lse[request * lse_batch_stride + (first_head + threadIdx.x) * lse_head_stride + split * lse_split_stride] =
            natural ? state.natural_lse() : state.lse();
    }
}
