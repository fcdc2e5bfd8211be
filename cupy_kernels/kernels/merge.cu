// Pass 2: merges attention states row by row. One block merges one row, its threads along head_dim; grid.x = rows.
// Row r is (r / inner, r % inner): a (request, query head) of strided arrays. All strides are in elements.
//
// Constants: IN (o of the states), OUT (o of the result), THREADS.
// A state with lse = -inf is skipped, never multiplied by zero: whatever its o holds can't leak.
#include "types.cuh"
#include "ptx.cuh"
#include "state.cuh"

struct Row {
    int outer, inner;
    __device__ long long offset(long long outer_stride, long long inner_stride) const {
        return outer * outer_stride + inner * inner_stride;
    }
};
__device__ __forceinline__ Row block_row(int inner) { return {(int)(blockIdx.x / inner), (int)(blockIdx.x % inner)}; }

// Takes the state (x, o_x) into the running state (merged, acc), one element of o.
__device__ __forceinline__ void take(Softmax& merged, float& acc, float x, float o_x) {
    acc *= merged.raise(x);
    const float weight = merged.weight(x);
    merged.l += weight;
    acc = fmaf(weight, o_x, acc);
}

extern "C" __global__ void __launch_bounds__(THREADS) merge(
    const IN* __restrict__ o_part,        // [outer, inner, num_states, head_dim] by its strides
    const float* __restrict__ lse_part,  // [outer, inner, num_states] by its strides
    OUT* __restrict__ o,                   // [outer, inner, head_dim] by its strides
    float* __restrict__ lse,             // [outer, inner] by its strides
    int inner,
    int num_states,
    int head_dim,
    float log2_per_unit,                 // log2(e) for natural lse, 1 for base 2
    int max_first,                       // the maximum of all states first, or else rescale online
    long long o_part_outer_stride,
    long long o_part_inner_stride,
    long long o_part_state_stride,
    long long lse_part_outer_stride,
    long long lse_part_inner_stride,
    long long lse_part_state_stride,
    long long o_outer_stride,
    long long o_inner_stride,
    long long lse_outer_stride,
    long long lse_inner_stride) {
    wait_for_previous_launch();
    const Row row = block_row(inner);
    const IN* o_row = o_part + row.offset(o_part_outer_stride, o_part_inner_stride);
    const float* lse_row = lse_part + row.offset(lse_part_outer_stride, lse_part_inner_stride);

    for (int d = threadIdx.x; d < head_dim; d += THREADS) {
        Softmax merged = {log2_per_unit};
        float acc = 0.f;
        // With the maximum known, no later state raises it: every rescale below is a multiplication by 1.
        for (int s = 0; max_first && s < num_states; s++) merged.raise(lse_row[s * lse_part_state_stride]);
        for (int s = 0; s < num_states; s++) {
            const float x = lse_row[s * lse_part_state_stride];
            if (x != NEG_INF) take(merged, acc, x, to_float(o_row[s * o_part_state_stride + d]));
        }
        o[row.offset(o_outer_stride, o_inner_stride) + d] = from_float<OUT>(merged.normalised(acc));
        if (d == 0) lse[row.offset(lse_outer_stride, lse_inner_stride)] = merged.lse();
    }
}

// Two states into one. The result may be the first state itself (in place); rows whose mask is 0 keep the first state.
extern "C" __global__ void __launch_bounds__(THREADS) merge_pair(
    const IN* o_a,                        // [outer, inner, head_dim] by its strides
    const float* lse_a,                  // [outer, inner] by its strides
    const IN* o_b,                        // as o_a, with strides of its own
    const float* lse_b,
    IN* o,                                // may be o_a
    float* lse,                          // may be lse_a
    const bool* mask,                    // [outer, inner] by its strides, or null: merge every row
    int inner,
    int head_dim,
    float log2_per_unit,                 // log2(e) for natural lse, 1 for base 2
    long long o_a_outer_stride,
    long long o_a_inner_stride,
    long long lse_a_outer_stride,
    long long lse_a_inner_stride,
    long long o_b_outer_stride,
    long long o_b_inner_stride,
    long long lse_b_outer_stride,
    long long lse_b_inner_stride,
    long long o_outer_stride,
    long long o_inner_stride,
    long long lse_outer_stride,
    long long lse_inner_stride,
    long long mask_outer_stride,
    long long mask_inner_stride) {
    wait_for_previous_launch();
    const Row row = block_row(inner);
    if (mask != nullptr && !mask[row.offset(mask_outer_stride, mask_inner_stride)]) return;
    const float x_a = lse_a[row.offset(lse_a_outer_stride, lse_a_inner_stride)];
    const float x_b = lse_b[row.offset(lse_b_outer_stride, lse_b_inner_stride)];
    const IN* a = o_a + row.offset(o_a_outer_stride, o_a_inner_stride);
    const IN* b = o_b + row.offset(o_b_outer_stride, o_b_inner_stride);
    // In place, the lse that one thread writes is the lse that the others have to read first.
    __syncthreads();

    for (int d = threadIdx.x; d < head_dim; d += THREADS) {
        Softmax merged = {log2_per_unit};
        float acc = 0.f;
        merged.raise(x_a);
        merged.raise(x_b);
        if (x_a != NEG_INF) take(merged, acc, x_a, to_float(a[d]));
        if (x_b != NEG_INF) take(merged, acc, x_b, to_float(b[d]));
        o[row.offset(o_outer_stride, o_inner_stride) + d] = from_float<IN>(merged.normalised(acc));
        if (d == 0) lse[row.offset(lse_outer_stride, lse_inner_stride)] = merged.lse();
    }
}
