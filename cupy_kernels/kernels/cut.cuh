// The cut of a batch into equal shares of whole pages, computed on the device by every block alike. Needs pages.cuh, WARPS.

// Of so many requests, 512 or more, a block keeps the lengths, and computes with the same ones throughout.
#define KEPT ((511 + THREADS) / THREADS * THREADS)

struct Batch {
    int* kept;  // [KEPT + THREADS] in shared memory: the first context_lens, then room for one more a thread
    const int* context_lens;
    long long stride;
    int size, most, unit_tokens;  // most: tokens of a row of the table
    Divider by_unit;

    // Each thread sees to a run of requests.
    __device__ int run() const { return (size + THREADS - 1) / THREADS; }
    __device__ int first_of_run() const { return threadIdx.x * run(); }

    // As it is now, of a request or of none.
    __device__ int read(int request) const { return request < size ? load_relaxed(context_lens + request * stride) : 0; }
    // Keeps those of the thread's run, the first of which is `first_length`. Returns the run's units; any_empty: a request without
    // tokens is among them.
    __device__ int keep(int first_length, bool& any_empty) const {
        const int first = first_of_run(), end = min(first + run(), size);
        int units = 0;
        #pragma unroll 1
        for (int i = first; i < end; i++) {
            const int length = i == first ? first_length : read(i), tokens = covered_length(length, most);
            if (i < KEPT) kept[i] = length;
            any_empty |= tokens == 0;
            units += units_of(tokens);
        }
        return units;
    }
    // Whether those after the first of the run are as they were.
    __device__ bool others_are_kept() const {
        const int first = first_of_run(), end = min(first + run(), min(size, KEPT));
        bool same = true;
        #pragma unroll 1
        for (int i = first + 1; i < end; i++) same &= kept[i] == read(i);
        return same;
    }
    __device__ int length(int request) const {
        int* place = kept + request;
        // By way of shared memory too: where both ways meet again, ptxas would wait for all loads under way, K and V among them.
        if (request >= KEPT) *(place = kept + KEPT + threadIdx.x) = read(request);
        return covered_length(*place, most);
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

// The share of block `turn` of `shares`, which each warp finds by itself from the units of all runs: so one barrier is enough. Shares
// are cut from the end backwards, so that of a small batch the first blocks have all, and the last ones, which begin last, nothing.
__device__ __forceinline__ Share cut_batch(
    const int* run_units, const Batch& batch, int turn, int shares, const Divider& by_shares, int min_units) {
    // A lane adds up some runs in a row, and a scan over the warp tells what lies before them.
    const int lane = lane_index(), each = (min(batch.size, THREADS) + 31) / 32;
    int mine = run_units[lane * each];
    #pragma unroll 1
    for (int i = 1; i < each; i++) mine += run_units[lane * each + i];
    int before = mine;
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    const int total = __shfl_sync(0xffffffffu, before, 31);
    before -= mine;
    const int per_share = max(min_units, by_shares.quotient(total + shares - 1));
    const int end = max(0, total - turn * per_share), begin = max(0, end - per_share);

    // From the lane that has `begin` to the run, and to the request. (A share without units is nobody's: any request will do.)
    const int owner = max(0, __ffs(__ballot_sync(0xffffffffu, begin >= before && begin < before + mine)) - 1);
    int row_begin = __shfl_sync(0xffffffffu, before, owner), run = owner * each;
    #pragma unroll 1
    for (int i = 1, units; i < each && begin >= row_begin + (units = run_units[run]); i++, run++) row_begin += units;
    int request = run * batch.run();
    const int last = min(request + batch.run(), batch.size) - 1;
    #pragma unroll 1
    for (int units; request < last && begin >= row_begin + (units = batch.units_of(batch.length(request))); request++)
        row_begin += units;
    return {shares - 1 - turn, begin, end, per_share, request, row_begin};
}
