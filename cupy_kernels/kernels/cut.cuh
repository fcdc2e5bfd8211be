// The cut of a batch into equal shares of whole pages, computed on the device by every block alike. Needs pages.cuh, WARPS.

// Of so many requests, 512 or more, a block keeps the lengths, and computes with the same ones throughout.
#define KEPT ((511 + THREADS) / THREADS * THREADS)

struct Batch {
    int* kept;  // [KEPT + THREADS] in shared memory: the first context_lens, then room for one more a thread
    const int* context_lens;
    long long stride;
    int size, max_pages, page_size, unit_tokens;
    Divider by_unit;

    // As it is now, of a request or of none.
    __device__ int read(int request) const { return request < size ? load_relaxed(context_lens + request * stride) : 0; }
    // Keeps them; the first one of each thread is `mine`.
    __device__ void keep(int mine) const {
        kept[threadIdx.x] = mine;
        #pragma unroll 1
        for (int i = threadIdx.x + THREADS; i < min(size, KEPT); i += THREADS) kept[i] = read(i);
    }
    // Whether the others are as they were.
    __device__ bool others_are_kept() const {
        bool same = true;
        #pragma unroll 1
        for (int i = threadIdx.x + THREADS; i < min(size, KEPT); i += THREADS) same &= kept[i] == read(i);
        return same;
    }
    __device__ int length(int request) const {
        int* place = kept + request;
        // By way of shared memory too: where both ways meet again, ptxas would wait for all loads under way, K and V among them.
        if (request >= KEPT) *(place = kept + KEPT + threadIdx.x) = read(request);
        return covered_length(*place, max_pages, page_size);
    }
    __device__ int units_of(int tokens) const { return tokens > 0 ? by_unit.quotient(tokens - 1) + 1 : 0; }
};

// Units [begin, end) of all requests end to end; `row_begin` of them lie before `request`, in which `begin` lies.
struct Share { int index, begin, end, per_share, request, row_begin; };

// What of a request is in a share: these tokens. So many shares that follow hold the rest. No request: -1.
struct Part { int request; Range tokens; int followers; };

// Takes the first part off a share.
__device__ __forceinline__ Part next_part(Share& left, const Batch& batch) {
    // Lengths that are not kept may have changed since the cut, as long as the launch in front writes them.
    while (left.begin < left.end && left.request < batch.size) {
        const int request = left.request++, tokens = batch.length(request);
        const int row_begin = left.row_begin, row_end = row_begin + batch.units_of(tokens);
        const int skipped = left.begin - row_begin, unit = batch.unit_tokens;
        left.begin = left.row_begin = row_end;
        const long long last = (long long)(left.end - row_begin) * unit;
        if (row_begin + skipped < row_end) {
            const int followers = row_end > left.end ? (row_end - left.end + left.per_share - 1) / left.per_share : 0;
            return {request, {skipped * unit, (int)min((long long)tokens, last)}, followers};
        }
    }
    return {-1, {0, 0}, 0};
}

// The share of block `turn` of `shares`, into shared memory. Shares are cut from the end backwards, so that of a small batch the
// first blocks have all, and the last ones, which begin last, nothing.
// Each thread counts a run of requests, and a scan over the block tells what lies before it.
__device__ void cut_batch(Share& share, const Batch& batch, int turn, int shares, const Divider& by_shares, int min_units) {
    __shared__ int warp_sums[WARPS];
    const int lane = lane_index(), warp = threadIdx.x / 32;
    const int run = (batch.size + THREADS - 1) / THREADS;
    const int first = min((int)threadIdx.x * run, batch.size), last = min(first + run, batch.size);
    int mine = 0;
    #pragma unroll 1
    for (int i = first; i < last; i++) mine += batch.units_of(batch.length(i));
    int before = mine;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) warp_sums[warp] = before;
    __syncthreads();
    before -= mine;
    int total = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) before += warp_sums[w];
        total += warp_sums[w];
    }
    const int per_share = max(min_units, by_shares.quotient(total + shares - 1));
    const int end = max(0, total - turn * per_share), begin = max(0, end - per_share);
    if (threadIdx.x == 0) share.index = shares - 1 - turn, share.begin = begin, share.end = end, share.per_share = per_share;
    if (begin >= before && begin < before + mine) {
        int request = first;
        #pragma unroll 1
        for (int units; request + 1 < last && begin >= before + (units = batch.units_of(batch.length(request))); request++) before += units;
        share.request = request, share.row_begin = before;
    }
    __syncthreads();
}
