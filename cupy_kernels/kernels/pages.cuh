// Where the tokens of a request lie: its pages, its length, and the cut into splits. All intervals are half open.

struct Range { int begin, end; };

struct PagedRow {
    const int* page_table;  // the row of this request
    int page_size;

    // cache[page_table[token / page_size], token % page_size], in elements. 64-bit: a pool may exceed 2^32 elements.
    __device__ long long offset(int token, long long page_stride, long long slot_stride) const {
        return page_table[token / page_size] * page_stride + token % page_size * slot_stride;
    }
};

// n / divisor for n < 2^31, the divisor's inverse computed on the host (tensor_core.divider): the instruction set can't divide. With
// 2^shift >= divisor, magic = 2^32 (2^shift / divisor - 1), rounded up (Granlund & Montgomery 1994).
struct Divider {
    unsigned magic, shift;

    __device__ explicit Divider(long long packed) : magic((unsigned)packed), shift((unsigned)(packed >> 32)) {}
    __device__ int quotient(int n) const { return (int)((__umulhi((unsigned)n, magic) + (unsigned)n) >> shift); }
};

// What a row of the table holds, as far as an int can tell.
__device__ __forceinline__ int most_tokens(int max_pages, int page_size) {
    return (int)min((long long)max_pages * page_size, 0x7fffffffLL);
}
// A length that the table can't hold, or a negative one, must not lead outside the table.
__device__ __forceinline__ int covered_length(int context_len, int most) { return max(0, min(context_len, most)); }

// Tokens of split `split`: its pages are [split * pps, (split + 1) * pps), cut at the length; pps = ceil(pages / num_splits)
// unless fixed by the caller. 64-bit: split * pps * page_size must not wrap, whatever the caller fixed.
__device__ __forceinline__ Range split_tokens(int length, int page_size, int split, int num_splits, int pages_per_split) {
    const long long pages = (length + (long long)page_size - 1) / page_size;
    const long long pps = pages_per_split > 0 ? pages_per_split : (pages + num_splits - 1) / num_splits;
    const long long begin = split * pps * page_size, end = begin + pps * page_size;
    return {(int)min(begin, (long long)length), (int)min(end, (long long)length)};
}

// What a window of `window` keys, the newest one included, leaves of these tokens; 0 is no window.
__device__ __forceinline__ Range visible_tokens(Range tokens, int length, int window) {
    const int first = window > 0 ? max(0, length - window) : 0;
    return {max(tokens.begin, first), max(tokens.end, first)};
}
