// Decode in one launch: the tokens of all requests, laid end to end, are cut into equal shares; one block computes one share for
// one KV head. A request is merged, and o written, by the block in whose share it begins; the blocks of the shares that hold the
// rest of it leave their pieces of its state in mailboxes, one a block: at most one request of a share began before it.
//
// Grid: (head_chunks, num_kv_heads, shares), 32 WARPS threads. A chunk is some of the query heads of one KV head. The blocks of a
// share, its columns, lie side by side and read the same pages at about the same time.
// The cut is computed here, from context_lens, in units of whole pages: no plan on the host, and a captured graph serves any lengths.
// Bits do not depend on timing: pieces are merged in the order of the shares.
//
// A block begins while the launch in front still runs (sm_90), finds its share and asks for its first pages into L2. That launch
// may yet write all of it, tables included. So, once it has ended, what the block went by is read again, and followed anew if it
// differs.
//
// A block waits, at its very end, for those of later shares. Shares are dealt to blocks from the last one backwards: what is waited
// for was started earlier, and waits for nobody but blocks started earlier still. So it ends, however few fit on the device at once.
#define WAITS_FOR_EARLIER_BLOCKS
//
// Constants: KV (q, K, V), OUT (o), HEAD_DIM, N_TILES, P_PARTS, WHOLE_TILES, WARPS, BLOCKS_PER_SM.

// Where there are registers for it, and it was seen to help.
#define PACED (HEAD_DIM == 128)
#include "stream.cuh"
#include "cut.cuh"
#include "mailboxes.cuh"

// The items of a block as they are dealt out to its warps, and those of a warp to its lanes. Of lanes that are `width` apart, sharers,
// one has an item, and the others help it with what it has to merge.
struct Deal {
    int first, count, log_width;  // items of this warp; lanes that take one each, a power of two

    __device__ explicit Deal(int items) {
        const int each = (items + WARPS - 1) / WARPS, warp = threadIdx.x / 32;
        first = warp * each, count = max(0, min(each, items - first)), log_width = min(5, 32 - __clz(each - 1));
    }
    __device__ int width() const { return 1 << log_width; }
    __device__ int place() const { return lane_index() & (width() - 1); }
    __device__ int sharer() const { return lane_index() >> log_width; }
    __device__ int sharers() const { return 32 >> log_width; }
};

// What is left of a warp's part of a request once its own block has `own` of it: the pieces of `followers` shares after this one. The
// sharers of an item share its pieces: 0 is its own, p that of share + p.
__device__ __forceinline__ Piece merge_followers(
    const Mailboxes& mailboxes, const Piece& own, int share, int followers, bool has_item, int item, const Deal& deal,
    float scale) {
    const int pieces = has_item ? followers + 1 : 0;
    Piece piece = mailboxes.merge<MERGE_BATCH>(scale, own, share, item, deal.sharer(), pieces, deal.sharers());
    #pragma unroll 1
    for (int step = deal.width(); step < 32; step *= 2) {
        const auto from_other = [&](float x) { return __shfl_xor_sync(0xffffffffu, x, step); };
        const float m = from_other(piece.m), l = from_other(piece.l);
        Piece other = {m, l};
        #pragma unroll
        for (int v = 0; v < PIECE_VECTORS; v++) {
            const float x = from_other(piece.acc[v].x), y = from_other(piece.acc[v].y);
            const float z = from_other(piece.acc[v].z), w = from_other(piece.acc[v].w);
            other.acc[v] = make_float4(x, y, z, w);
        }
        piece = merge_pieces<2>(scale, 2, [&](int j) { return j == 0 ? piece : other; });
    }
    return piece;
}

// A warp's way through the parts of a share.
struct Spans {
    Share* left;  // in shared memory, this warp's own
    const Batch& batch;
    const int* page_table;
    long long page_table_stride;

    __device__ bool next(Span& span) {
        Share share = *left;
        const Part part = next_part(share, batch);
        __syncwarp();
        *left = share;
        __syncwarp();
        if (part.request >= 0) span = {page_table + part.request * page_table_stride, part.tokens};
        return part.request >= 0;
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) balanced(
    const KV* __restrict__ q,              // [batch_size, num_q_heads, head_dim] by its strides, rows aligned to 16 bytes
    const KV* __restrict__ k_cache,        // [pool_pages, page_size, num_kv_heads, head_dim] by its strides, rows aligned likewise
    const KV* __restrict__ v_cache,        // as k_cache, with strides of its own
    const int* __restrict__ page_table,    // [batch_size, max_pages]
    const int* __restrict__ context_lens,  // [batch_size]
    OUT* __restrict__ o,                   // [batch_size, num_q_heads, head_dim] by its strides
    float* __restrict__ lse,               // [batch_size, num_q_heads] by its strides
    float* o_pieces,                       // [shares, columns, heads of a block, head_dim], undivided: mailboxes, all NOT_THERE
    float* sum_pieces,                     // [shares, columns, heads of a block, head_dim / 4, 2]: m, l; likewise, and so left
    unsigned* progress,                    // [PACED_WORDS, PACED_STRIDE], whatever it holds: the first of each row is a Pace's word
    int batch_size,
    int group_size,
    int chunk_heads,                       // query heads of a chunk; the last one may have fewer
    int page_size,
    long long page_divider,                // n / page_size: see Divider
    int max_pages,
    int pool_pages,
    long long unit_divider,
    long long share_divider,               // of gridDim.z
    int unit_tokens,                       // the least multiple of page_size that fills a tile
    int min_units,                         // of a share: a batch too small to fill the device is cut into fewer shares
    int paced_units,                       // of a share: in less, blocks don't drift apart far enough to be paced
    float scale_log2,                      // sm_scale * log2(e), not 0
    int natural,                           // lse in natural logarithms, or else in base 2
    long long q_batch_stride,              // all strides in elements
    long long q_head_stride,
    long long k_page_stride,
    int k_slot_stride,
    long long k_head_stride,
    long long v_page_stride,
    int v_slot_stride,
    long long v_head_stride,
    long long page_table_stride,
    long long context_lens_stride,
    long long o_batch_stride,
    long long o_head_stride,
    long long lse_batch_stride,
    long long lse_head_stride) {
    const int kv_head = blockIdx.y, first_head = kv_head * group_size + blockIdx.x * chunk_heads;
    const int heads = min(chunk_heads, (int)(group_size - blockIdx.x * chunk_heads)), items = heads * COLUMNS;
    const int columns = gridDim.x * gridDim.y, column = blockIdx.y * gridDim.x + blockIdx.x;
    const float scale = fabsf(scale_log2);

    DYNAMIC_SHARED(float4, shared);
    // In shared memory, as registers are scarce while tiles stream: what is left of the share for the
    // block and for each warp's loads, this turn's part of a request, the next.
    __shared__ Share left, ahead[WARPS];
    __shared__ Part parts[2];
    __shared__ int kept[KEPT + THREADS], run_units[THREADS];
    __shared__ bool has_empty;  // the batch, a request without tokens
    __shared__ uint4 progress_seen;
    const Exchange exchange = exchange_at(shared, chunk_heads);
    // The warp that has the fewest tiles, as each request begins with the first one.
    const bool looks_ahead = threadIdx.x / 32 == WARPS - 1;
    const auto q_of = [&](int request) -> Heads {
        return {q + request * q_batch_stride + first_head * q_head_stride, q_head_stride, heads};
    };
    const auto output = [&](int request) -> Output {
        return {o + request * o_batch_stride + first_head * o_head_stride,
                lse + request * lse_batch_stride + first_head * lse_head_stride, o_head_stride, lse_head_stride, natural != 0};
    };

    if (PACED && threadIdx.x == 0) progress_seen.x = NO_LOOK_YET;
    const Batch batch = {
        kept, context_lens, context_lens_stride, batch_size, most_tokens(max_pages, page_size), unit_tokens, Divider(unit_divider)};
    Feed<Spans> feed = {
        {ahead + threadIdx.x / 32, batch, page_table, page_table_stride},
        {k_cache + kv_head * k_head_stride, k_page_stride, k_slot_stride},
        {v_cache + kv_head * v_head_stride, v_page_stride, v_slot_stride}, page_size, Divider(page_divider)};
    // The first look at the tables decides what to ask for into L2, where later writes land too, and to load from there after the
    // wait. It is repeated if they have changed since, or if there were more lengths than it kept.
    int length = batch.read(batch.first_of_run());
    for (bool kept_all = batch_size <= KEPT, current = false; !current; kept_all = true) {
        bool any_empty = false;
        run_units[threadIdx.x] = batch.keep(length, any_empty);
        any_empty = __syncthreads_or(any_empty);
        Share share = cut_batch(run_units, batch, blockIdx.z, gridDim.z, Divider(share_divider), min_units);
        if (threadIdx.x == 0) left = share, has_empty = any_empty;
        const Part part = next_part(share, batch);
        const int request = part.request;
        ahead[threadIdx.x / 32] = share;
        __syncwarp();
        feed.find_first({page_table + max(request, 0) * page_table_stride, part.tokens});
        feed.prefetch_first(pool_pages);
        if (request >= 0 && threadIdx.x < heads) prefetch(q_of(request).q + threadIdx.x * q_head_stride, 2 * HEAD_DIM);
        // Used before the wait: ptxas gives it and what is read after the wait one scoreboard, and would wait for both.
        const int page = feed.place.page = inside_pool(feed.place.page, pool_pages);
        wait_for_previous_launch();
        let_next_launch_begin();
        // What is small first: loads come back in their order, and K and V need not wait for the whole block.
        const int seen = length;
        length = batch.read(batch.first_of_run());
        const Place place = feed.place_now();
        if (request >= 0) ask_for_q<THREADS>(exchange.q, q_of(request));
        const bool same = kept_all && length == seen && inside_pool(place.page, pool_pages) == page;
        feed.load_first();
        if (request >= 0) take_q<THREADS>(exchange.q, scale_log2);
        current = __syncthreads_and(same && batch.others_are_kept());
    }
    Pace pace = {progress, &progress_seen.x};
    if (PACED && left.per_share >= paced_units) {
        // Shares that are not empty: of blocks before this one all, and as many from here on as hold what ends with this one.
        const int shares = blockIdx.z + (left.end + left.per_share - 1) / left.per_share;
        pace = Pace::begin(progress, &progress_seen.x, shares * columns, blockIdx.z * columns + column);
    }
    if (threadIdx.x == 0) parts[0] = next_part(left, batch);
    __syncthreads();
    for (int turn = 0; parts[turn].request >= 0; turn ^= 1) {
        const Part &part = parts[turn], &next = parts[turn ^ 1];
        if (looks_ahead) {
            if (lane_index() == 0) parts[turn ^ 1] = next_part(left, batch);
            __syncwarp();
            // Long before it is needed: when the next K and V are under way, it would come after them.
            if (next.request >= 0) ask_for_q<32>(exchange.q_of_turn(turn ^ 1), q_of(next.request));
        }
        attend(feed, part.tokens, exchange.q_of_turn(turn), scale, heads, exchange, pace);
        __syncthreads();

        const Mailboxes mailboxes = {
            reinterpret_cast<float4*>(o_pieces), reinterpret_cast<float2*>(sum_pieces), columns, column, chunk_heads * COLUMNS};
        const Deal deal(items);
        const int place = deal.place();
        #pragma unroll 1
        for (int i = place; i - place < deal.count; i += deal.width()) {
            const int item = deal.first + i, head = item / COLUMNS, c = item % COLUMNS;
            const bool has_item = i < deal.count, writes = has_item && deal.sharer() == 0;
            const bool begins_here = part.tokens.begin == 0, merges = begins_here && part.followers > 0;
            Piece piece;
            if (writes) piece = block_state(exchange, scale, head, heads, c);
            if (merges) piece = merge_followers(mailboxes, piece, left.index, part.followers, has_item, item, deal, scale);
            if (writes && begins_here) output(part.request).write(piece, scale, head, c);
            if (writes && !begins_here) mailboxes.put(left.index, item, piece);
        }
        if (next.request < 0) break;
        if (looks_ahead) take_q<32>(exchange.q_of_turn(turn ^ 1), scale_log2);
        __syncthreads();
    }
    pace.finish();
    // Requests without tokens are in nobody's share.
    if (!has_empty) return;
    #pragma unroll 1
    for (int request = blockIdx.z; request < batch_size; request += gridDim.z)
        #pragma unroll 1
        for (int i = threadIdx.x; i < items && batch.length(request) == 0; i += THREADS)
            output(request).write({}, scale, i / COLUMNS, i % COLUMNS);
}
