// Undivided states in pieces, how they become one, and o and lse.
//
// Constants: OUT (o), HEAD_DIM, N_TILES. THREADS: of a block.
#include "types.cuh"
#include "ptx.cuh"
#include "state.cuh"

// Piece c of an undivided state of one query head, 0 <= c < COLUMNS: columns 4 c to 4 c + 3 of its accumulator and, where a block would
// have more pieces than 8 warps have lanes, four more, 4 COLUMNS further on. What warps and blocks hand to each other.
#define PIECE_VECTORS (N_TILES > 1 || HEAD_DIM > 128 ? 2 : 1)
#define COLUMNS (HEAD_DIM / 4 / PIECE_VECTORS)
struct Piece {
    float m = NEG_INF, l = 0.f;
    float4 acc[PIECE_VECTORS] = {};
};

template <class F> __device__ __forceinline__ float4 map(const float4& x, F f) {
    return make_float4(f(x.x), f(x.y), f(x.z), f(x.w));
}

// Pieces of one head and the same columns become one, a batch at a time.
struct Merge {
    Softmax merged;
    Piece result;

    __device__ explicit Merge(float scale) : merged{scale} {}
    template <int BATCH> __device__ void take(const Piece (&pieces)[BATCH]) {
        float top = NEG_INF;
        #pragma unroll
        for (int i = 0; i < BATCH; i++) top = fmaxf(top, pieces[i].m);
        const float alpha = merged.raise(top);
        #pragma unroll
        for (float4& acc : result.acc) acc = map(acc, [&](float x) { return x * alpha; });
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float weight = merged.take(pieces[i].m, pieces[i].l);
            #pragma unroll
            for (int v = 0; v < PIECE_VECTORS; v++) {
                const float4 x = pieces[i].acc[v], acc = result.acc[v];
                result.acc[v] = make_float4(
                    fmaf(weight, x.x, acc.x), fmaf(weight, x.y, acc.y), fmaf(weight, x.z, acc.z), fmaf(weight, x.w, acc.w));
            }
        }
    }
    __device__ Piece piece() {
        result.m = merged.m, result.l = merged.l;
        return result;
    }
};

// Merges `count` pieces, BATCH at a time, so that the reads of a batch don't wait for each other.
template <int BATCH, class Read> __device__ __forceinline__ Piece merge_pieces(float scale, int count, Read read) {
    Merge merge(scale);
    #pragma unroll 1
    for (int first = 0; first < count; first += BATCH) {
        Piece pieces[BATCH];
        #pragma unroll
        for (int i = 0; i < BATCH; i++) {
            pieces[i] = {};
            if (first + i < count) pieces[i] = read(first + i);
        }
        merge.take(pieces);
    }
    return merge.piece();
}

// Pieces of one column that a thread has under way at once when it merges; registers decide.
#define MERGE_BATCH (THREADS > 256 || PIECE_VECTORS > 1 ? 4 : 8)

// x / l, given 1 / l: rounded as a division is, at the cost of a product and a remainder (Markstein 1990). Infinite as x is.
__device__ __forceinline__ float quotient(float x, float l, float inverse) {
    const float q = x * inverse, rest = fmaf(-q, l, x);
    // Selected, not branched over: four in a row are waited for once.
    const bool finite = fabsf(q) < __int_as_float(0x7f800000);
    return fmaf(finite ? rest : 0.f, finite ? inverse : 0.f, q);
}

// o and lse of one request: o[head, d], lse[head].
struct Output {
    OUT* o;
    float* lse;
    long long o_head_stride, lse_head_stride;
    bool natural;

    __device__ void write(const Piece& piece, float scale, int head, int c) const {
        const Softmax state = {scale, piece.m, piece.l};
        const float inverse = 1.f / piece.l, state_lse = computed_here(state.scaled_lse(natural));
        #pragma unroll
        for (int v = 0; v < PIECE_VECTORS; v++) {
            const float4 acc = piece.acc[v];
            const float x[4] = {acc.x, acc.y, acc.z, acc.w};
            OUT* to = o + head * o_head_stride + 4 * (c + v * COLUMNS);
            #pragma unroll
            for (int i = 0; i < 4; i++) to[i] = from_float<OUT>(state.empty() ? 0.f : quotient(x[i], piece.l, inverse));
        }
        if (c == 0) lse[head * lse_head_stride] = state_lse;
    }
};
