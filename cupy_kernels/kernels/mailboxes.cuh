// Where blocks leave pieces of a request for the one that merges it. Needs pieces.cuh.

// A word of a mailbox that nothing was written to yet, also between launches: a NaN that no piece holds, as another one takes its
// place. So each word says by itself whether it is there, and neither fences nor counters are needed.
#define NOT_THERE 0xffffffffu

__device__ __forceinline__ bool is_there(float x) { return __float_as_uint(x) != NOT_THERE; }
__device__ __forceinline__ bool is_there(const Piece& x) {
    // NOT_THERE is the largest word of all.
    const auto largest = [](float a, float b) { return max(__float_as_uint(a), __float_as_uint(b)); };
    unsigned word = largest(x.m, x.l);
    #pragma unroll
    for (const float4& acc : x.acc) word = max(word, max(largest(acc.x, acc.y), largest(acc.z, acc.w)));
    return word != NOT_THERE;
}
__device__ __forceinline__ Piece without_not_there(const Piece& x) {
    const auto other = [](float word) { return is_there(word) ? word : __uint_as_float(NOT_THERE >> 1); };
    Piece piece = {other(x.m), other(x.l)};
    #pragma unroll
    for (int v = 0; v < PIECE_VECTORS; v++) piece.acc[v] = map(x.acc[v], other);
    return piece;
}

// The pieces of all shares for one column of blocks. An item is what one piece is of.
struct Mailboxes {
    float4* rows;  // [shares, columns, items, PIECE_VECTORS]: the undivided o
    float2* sums;  // [shares, columns, items]: m, l
    int columns, column, items;

    __device__ long long at(int share, int item) const { return ((long long)share * columns + column) * items + item; }
    __device__ void put(int share, int item, const Piece& any) const {
        const Piece piece = without_not_there(any);
        const long long i = at(share, item);
        store_relaxed(sums + i, make_float2(piece.m, piece.l));
        #pragma unroll
        for (int v = 0; v < PIECE_VECTORS; v++) store_relaxed(rows + i * PIECE_VECTORS + v, piece.acc[v]);
    }
    // Merges pieces begin, begin + step, ... before `end` of an item, in this order: 0 is `own`, p is that of share + p. BATCH of them
    // are read at once, and what of them was not there is read again.
    template <int BATCH>
    __device__ Piece merge(float scale, const Piece& own, int share, int item, int begin, int end, int step) const {
        const float x = __uint_as_float(NOT_THERE);
        const long long stride = (long long)step * columns * items;
        Merge merge(scale);
        #pragma unroll 1
        for (int first = begin; first < end; first += BATCH * step) {
            const long long at_first = at(share + first, item);
            Piece pieces[BATCH];
            // A bit each: there are not as many predicates.
            unsigned missing = 0;
            #pragma unroll
            for (int i = 0; i < BATCH; i++) pieces[i] = {}, missing |= (first + i * step < end) << i;
            if (first == 0) pieces[0] = own, missing &= ~1u;
            while (missing) {
                #pragma unroll
                for (int i = 0; i < BATCH; i++)
                    if (missing >> i & 1) {
                        const long long at = at_first + i * stride;
                        const float2 sum = load_relaxed(sums + at);
                        pieces[i].m = sum.x, pieces[i].l = sum.y;
                        #pragma unroll
                        for (int v = 0; v < PIECE_VECTORS; v++) pieces[i].acc[v] = load_relaxed(rows + at * PIECE_VECTORS + v);
                    }
                #pragma unroll
                for (int i = 0; i < BATCH; i++)
                    if ((missing >> i & 1) && is_there(pieces[i])) {
                        missing ^= 1u << i;
                        // Emptied at once: while others are waited for, that costs nothing.
                        const long long at = at_first + i * stride;
                        store_relaxed(sums + at, make_float2(x, x));
                        #pragma unroll
                        for (int v = 0; v < PIECE_VECTORS; v++)
                            store_relaxed(rows + at * PIECE_VECTORS + v, make_float4(x, x, x, x));
                    }
                if (missing) look_again();
            }
            merge.take(pieces);
        }
        return merge.piece();
    }
};
