// Pass 2: merges attention states row by row. A warp takes BATCH states of a row, all loaded at once, WIDTH columns a lane, and
// merges them one after the other. A row of more states is dealt to `ways` warps, a batch each in turn, and the first of them merges
// their sums. So the order of operations depends on a state's place alone: empty states behind the others change no bit.
//
// grid.x = ceil(rows * ways / WARPS) * chunks of 32 * WIDTH columns; the warps of a row are neighbours in one block.
// Row r is (r / inner, r % inner): a (request, query head) of strided arrays. All strides are in elements.
//
// Constants: IN (o of the states), OUT (o of the result), WIDTH (4 where IN is aligned to 4 elements, else 1), BATCH, THREADS.
// A state with lse = -inf is skipped, never multiplied by zero: whatever its o holds can't leak.
#include "types.cuh"
#include "ptx.cuh"
#include "state.cuh"
#include "warp.cuh"

#define WARPS (THREADS / 32)
static_assert(BATCH <= 32, "a lane has the lse of one state of a batch");

struct Row {
    unsigned outer, inner;
    __device__ long long offset(long long outer_stride, long long inner_stride) const {
        return outer * outer_stride + inner * inner_stride;
    }
};

// Neighbouring columns of one row, loaded and stored at once.
template <class T> struct alignas(WIDTH * sizeof(T)) Columns { T at[WIDTH]; };
template <class T> __device__ __forceinline__ Columns<T> load(const T* from) { return *reinterpret_cast<const Columns<T>*>(from); }

// A running state, WIDTH columns of its o.
struct Running {
    Softmax sum;
    Columns<float> acc;

    __device__ void raise(float x) {
        const float alpha = sum.raise(x);
        for (float& a : acc.at) a *= alpha;
    }

    template <class T> __device__ void add(float weight, const Columns<T>& o) {
        for (int i = 0; i < WIDTH; i++) acc.at[i] = fmaf(weight, to_float(o.at[i]), acc.at[i]);
    }

    // Takes in the state (x, o_x), whose x an earlier raise() has covered.
    __device__ void take(float x, const Columns<IN>& o_x) {
        const float weight = sum.weight(x);
        sum.l += weight;
        add(weight, o_x);
    }

    // Columns [d, d + WIDTH) of o, and with the first of them lse. The caller's o may be aligned to its elements alone.
    template <class T> __device__ void store(T* o, float* lse, int d) const {
        Columns<T> result;
        for (int i = 0; i < WIDTH; i++) result.at[i] = from_float<T>(sum.normalised(acc.at[i]));
        if (reinterpret_cast<unsigned long long>(o + d) % sizeof(result) == 0) {
            *reinterpret_cast<Columns<T>*>(o + d) = result;
        } else {
            for (int i = 0; i < WIDTH; i++) o[d + i] = result.at[i];
        }
        if (d == 0) *lse = sum.lse();
    }
};

// No __restrict__: what is said to be read-only may be loaded before wait_for_previous_launch() returns.
extern "C" __global__ void __launch_bounds__(THREADS) merge(
    const IN* o_part,                    // [outer, inner, num_states, head_dim] by its strides
    const float* lse_part,               // [outer, inner, num_states] by its strides
    OUT* o,                              // [outer, inner, head_dim] by its strides
    float* lse,                          // [outer, inner] by its strides
    int rows,                            // outer * inner
    int inner,
    int num_states,
    int head_dim,
    int ways,                            // a power of two up to WARPS: batches of a row, or WARPS if those are more
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
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = (head_dim + 32 * WIDTH - 1) / (32 * WIDTH);
    const unsigned worker = blockIdx.x / chunks * WARPS + warp, way = worker % ways;
    // Warps past the last row and lanes past the last column do the last one's work once more.
    const unsigned r = min(worker / ways, rows - 1u);
    const unsigned d = min((blockIdx.x % chunks * 32 + lane) * WIDTH, (unsigned)(head_dim - WIDTH));
    const Row row = {r / inner, r % inner};
    const float* lse_row = lse_part + row.offset(lse_part_outer_stride, lse_part_inner_stride);

    Running merged = {{log2_per_unit}};
    for (int first = way * BATCH; first < num_states; first += ways * BATCH) {
        // A lane has the lse of one state, and its columns of all.
        const float* lse_s = lse_row + (first + lane) * lse_part_state_stride;
        const float own_x = lane < BATCH && first + lane < num_states ? *lse_s : NEG_INF;
        const IN* o_s = o_part + row.offset(o_part_outer_stride, o_part_inner_stride) + first * o_part_state_stride + d;
        Columns<IN> o_x[BATCH];
        #pragma unroll
        for (int i = 0; i < BATCH; i++, o_s += o_part_state_stride)
            if (first + i < num_states) o_x[i] = load(o_s);
        // With the maximum known, no later state raises it. It is found while the first batch is under way.
        if (max_first && first < ways * BATCH) {
            float top = own_x;
            #pragma unroll 4
            for (int s = lane; ways > 1 && s < num_states; s += 32) top = fmaxf(top, lse_row[s * lse_part_state_stride]);
            merged.raise(warp_max(top));
        }
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float x = __shfl_sync(0xffffffffu, own_x, i);
            if (x == NEG_INF) continue;
            if (!max_first) merged.raise(x);
            merged.take(x, o_x[i]);
        }
    }

    if (ways > 1) {
        __shared__ float m[WARPS], l[WARPS];
        __shared__ Columns<float> acc[WARPS][32];
        m[warp] = merged.sum.m, l[warp] = merged.sum.l, acc[warp][lane] = merged.acc;
        __syncthreads();
        if (way > 0) return;
        merged = {{log2_per_unit}};
        for (unsigned w = warp; w < warp + ways; w++) merged.raise(m[w]);
        for (unsigned w = warp; w < warp + ways; w++) merged.add(merged.sum.take(m[w], l[w]), acc[w][lane]);
    }
    merged.store(o + row.offset(o_outer_stride, o_inner_stride), lse + row.offset(lse_outer_stride, lse_inner_stride), d);
}

// Two states into one, a warp a row; grid.x = ceil(rows / WARPS). The result may be the first state itself (in place); rows whose
// mask is 0 keep the first state.
extern "C" __global__ void __launch_bounds__(THREADS) merge_pair(
    const IN* o_a,                       // [outer, inner, head_dim] by its strides
    const float* lse_a,                  // [outer, inner] by its strides
    const IN* o_b,                       // as o_a, with strides of its own
    const float* lse_b,
    IN* o,                               // may be o_a
    float* lse,                          // may be lse_a
    const bool* mask,                    // [outer, inner] by its strides, or null: merge every row
    int rows,                            // outer * inner
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
    const unsigned r = blockIdx.x * WARPS + threadIdx.x / 32;
    const Row row = {r / inner, r % inner};
    if (r >= (unsigned)rows || mask != nullptr && !mask[row.offset(mask_outer_stride, mask_inner_stride)]) return;
    const float x_a = lse_a[row.offset(lse_a_outer_stride, lse_a_inner_stride)];
    const float x_b = lse_b[row.offset(lse_b_outer_stride, lse_b_inner_stride)];
    const IN* a = o_a + row.offset(o_a_outer_stride, o_a_inner_stride);
    const IN* b = o_b + row.offset(o_b_outer_stride, o_b_inner_stride);
    // In place, the lse that one lane writes is the lse that the others have to read first.
    __syncwarp();

    for (int d = threadIdx.x % 32 * WIDTH; d < head_dim; d += 32 * WIDTH) {
        const Columns<IN> columns_a = load(a + d), columns_b = load(b + d);
        Running merged = {{log2_per_unit}};
        merged.raise(x_a);
        merged.raise(x_b);
        if (x_a != NEG_INF) merged.take(x_a, columns_a);
        if (x_b != NEG_INF) merged.take(x_b, columns_b);
        merged.store(o + row.offset(o_outer_stride, o_inner_stride), lse + row.offset(lse_outer_stride, lse_inner_stride), d);
    }
}
