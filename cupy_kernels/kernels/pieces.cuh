// What warps and blocks hand to each other: undivided states, and how they become one, and o and lse.
//
// Constants: OUT (o). THREADS: of a block.
#include "types.cuh"
#include "ptx.cuh"
#include "state.cuh"

// An undivided state of one query head, four columns of its accumulator: what warps and blocks hand to each other.
struct Piece { float m, l; float4 acc; };
#define EMPTY_PIECE Piece{NEG_INF, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)}

// Pieces that are always there to read.
struct Present { __device__ bool operator()(const Piece&) const { return true; } };

// Merges pieces of one head and four columns, BATCH at a time, so that the reads of a batch don't wait for each other. What of a
// batch is not there is read again.
template <int BATCH, class Read, class There = Present>
__device__ __forceinline__ Piece merge_pieces(float scale, int begin, int end, int step, Read read, There there = {}) {
    Softmax merged = {scale};
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
    #pragma unroll 1
    for (int first = begin; first < end; first += BATCH * step) {
        Piece pieces[BATCH];
        bool wanted[BATCH];
        #pragma unroll
        for (int i = 0; i < BATCH; i++) pieces[i] = EMPTY_PIECE, wanted[i] = first + i * step < end;
        while (true) {
            #pragma unroll
            for (int i = 0; i < BATCH; i++)
                if (wanted[i]) pieces[i] = read(first + i * step);
            bool incomplete = false;
            #pragma unroll
            for (int i = 0; i < BATCH; i++) incomplete |= wanted[i] = wanted[i] && !there(pieces[i]);
            if (!incomplete) break;
            look_again();
        }
        float top = NEG_INF;
        #pragma unroll
        for (int i = 0; i < BATCH; i++) top = fmaxf(top, pieces[i].m);
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

// Pieces of one column that a thread has under way at once when it merges; registers decide.
#define MERGE_BATCH (THREADS > 256 ? 4 : 8)

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

    __device__ void write(const Piece& piece, float scale, int head, int column) const {
        const Softmax state = {scale, piece.m, piece.l};
        const float inverse = 1.f / piece.l;
        const float acc[4] = {piece.acc.x, piece.acc.y, piece.acc.z, piece.acc.w};
        #pragma unroll
        for (int i = 0; i < 4; i++)
            o[head * o_head_stride + 4 * column + i] = from_float<OUT>(state.empty() ? 0.f : quotient(acc[i], piece.l, inverse));
        if (column == 0) lse[head * lse_head_stride] = state.scaled_lse(natural);
    }
};
