// The cut of a batch into equal shares of whole pages, computed on the device by every block alike. Needs pages.cuh, WARPS.

struct Batch {
    const int* context_lens;
    long long stride;
    int size, max_pages, page_size, unit_tokens;
    Divider by_unit;

    __device__ int length(int request) const { return covered_length(context_lens[request * stride], max_pages, page_size); }
    __device__ int units(int request) const {
        const int tokens = length(request);
        return tokens > 0 ? by_unit.quotient(tokens - 1) + 1 : 0;
    }
};

// Units [begin, end) of all requests end to end; `row_begin` of them lie before `request`, in which `begin` lies.
struct Share { int index, begin, end, per_share, request, row_begin; };

// What of a request is in a share: these tokens. So many shares that follow hold the rest. No request: -1.
struct Part { int request; Range tokens; int followers; };

// Takes the first part off a share.
__device__ __forceinline__ Part next_part(Share& left, const Batch& batch) {
    while (left.begin < left.end) {
        const int request = left.request++, row_begin = left.row_begin, row_end = row_begin + batch.units(request);
        const int skipped = left.begin - row_begin, unit = batch.unit_tokens;
        left.begin = left.row_begin = row_end;
        const long long last = (long long)(left.end - row_begin) * unit;
        if (row_begin + skipped < row_end) {
            const int followers = row_end > left.end ? (row_end - left.end + left.per_share - 1) / left.per_share : 0;
            return {request, {skipped * unit, (int)min((long long)batch.length(request), last)}, followers};
        }
    }
    return {-1, {0, 0}, 0};
}

// The cut for share `index`, into shared memory. Each thread counts a run of requests, and a scan over the block tells what lies
// before it.
__device__ void cut_batch(Share& share, const Batch& batch, int index, int shares, const Divider& by_shares, int min_units) {
    __shared__ int warp_sums[WARPS];
    const int lane = lane_index(), warp = threadIdx.x / 32;
    const int run = (batch.size + THREADS - 1) / THREADS;
    const int first = min((int)threadIdx.x * run, batch.size), last = min(first + run, batch.size);
    int mine = 0;
    #pragma unroll 1
    for (int i = first; i < last; i++) mine += batch.units(i);
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
    const int begin = min(total, index * per_share), end = min(total, begin + per_share);
    if (threadIdx.x == 0) share.index = index, share.begin = begin, share.end = end, share.per_share = per_share;
    if (begin >= before && begin < before + mine) {
        int request = first;
        #pragma unroll 1
        for (int units; request + 1 < last && begin >= before + (units = batch.units(request)); request++) before += units;
        share.request = request, share.row_begin = before;
    }
    __syncthreads();
}
