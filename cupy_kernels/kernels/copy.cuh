// How the K and V of a tile, 16 tokens of one KV head, come from global memory to the lanes that use them.
//
// The warp loads whole rows, 16 bytes a lane, neighbours side by side, and keeps them in registers while they are under way: other
// orders of access, and asynchronous copies, were slower (bench/NOTES.md). Once they are there it puts them in its slot of shared
// memory, rows padded so that the lanes that read together find theirs in different banks.
//
// Constants: KV, HEAD_DIM, N_TILES, P_PARTS (see tile.cuh), WHOLE_TILES (page_size % 16 == 0).
#include "types.cuh"
#include "ptx.cuh"
#include "pages.cuh"

#define TILE 16
// Of 16 bytes, in a row.
#define CHUNKS (HEAD_DIM / 8)
// Whether a tile's K and V are under way together, or in turn; and whether the next K then has to wait for O. Registers hold no more
// than 8 KB of a warp under way, and less where O and P are large.
#define TOGETHER (HEAD_DIM <= 128 && N_TILES * P_PARTS < 6)
#define LATE_K (HEAD_DIM > 128)
// Rows in a slot, V behind K or in its place. Read at once: of K, 4 chunks side by side of rows g and g + 1; of V, 2 chunks of
// 4 rows, 2 apart.
#define K_ROW_BYTES (16 * ((CHUNKS + 3) / 8 * 8 + 4))
#define V_ROW_BYTES (16 * (CHUNKS + 1))
#define SLOT_BYTES (TILE * (K_ROW_BYTES + (TOGETHER ? V_ROW_BYTES : 0)))
// Words of two elements: of a K row that 4 lanes share, of a V row that 8 lanes share.
#define K_WORDS (HEAD_DIM / 8)
#define V_WORDS (HEAD_DIM / 16)
static_assert(HEAD_DIM % 16 == 0 && V_WORDS % 4 != 3, "a lane's part of a row must be made of pieces of 16, 8 and 4 bytes");

// Column of the first element of piece `piece` of a row that LANES lanes share: 16 bytes a lane, then one smaller rest.
template <int LANES> __device__ __forceinline__ int column_of(int part, int piece) {
    constexpr int WORDS = HEAD_DIM / 2 / LANES, PIECES = WORDS / 4, REST = WORDS % 4;
    return piece * LANES * 8 + part * (piece < PIECES ? 8 : 2 * REST);
}

// Where a column of a row lies in a slot.
template <bool IS_V> __device__ __forceinline__ int place_in_slot(int row, int column) {
    return (IS_V && TOGETHER ? TILE * K_ROW_BYTES : 0) + row * (IS_V ? V_ROW_BYTES : K_ROW_BYTES) + 2 * column;
}

// Words [first, first + COUNT) of a lane's part of a row, or as many as there are.
template <bool IS_V, int COUNT> __device__ __forceinline__ uint4 load_words(const char* slot, int row, int part, int first) {
    constexpr int LANES = IS_V ? 8 : 4, WORDS = HEAD_DIM / 2 / LANES;
    const char* from = slot + place_in_slot<IS_V>(row, column_of<LANES>(part, first / 4) + first % 4 * 2);
    const int count = min(COUNT, WORDS - first);
    if (count == 4) return load_shared_16(from);
    if (count == 1) return make_uint4(load_shared_4(from), 0, 0, 0);
    const uint2 x = load_shared_8(from);
    return make_uint4(x.x, x.y, 0, 0);
}

// K of one KV head, or V: its first element in page 0, and strides in elements.
struct Cache {
    const KV* base;
    long long page_stride;
    int slot_stride;
};

// A page id that may be out of date, or never was one: of a page of the pool in any case.
__device__ __forceinline__ int inside_pool(int page, int pool_pages) { return (int)min((unsigned)page, (unsigned)pool_pages - 1); }

// Page and slot of the tile's token lane % 16; of its first token where a page holds the whole tile. Past `end` the last token is
// repeated: no page id is read that is not visible. Not through L1: what a look before wait_for_previous_launch() left there would
// be out of date.
struct Place { int page, slot; };
__device__ __forceinline__ Place place_of(
    const int* page_table, int page_size, const Divider& by_page, int first, int end, int lane) {
    const int token = WHOLE_TILES ? first : min(first + lane % TILE, end - 1), page = by_page.quotient(token);
    return {load_relaxed(page_table + page), token - page * page_size};
}
__device__ __forceinline__ const KV* row_at(const Cache& cache, const Place& place, int row) {
    int page = place.page, slot = place.slot + row;
    if (!WHOLE_TILES) {
        page = __shfl_sync(0xffffffffu, place.page, row);
        slot = __shfl_sync(0xffffffffu, place.slot, row);
    }
    return cache.base + page * cache.page_stride + (long long)slot * cache.slot_stride;
}

__device__ __forceinline__ int v_token(int i, int t) { return 2 * t + i % 2 + i / 2 * 8; }

// A lane's part of the rows of K or V of a tile: chunk lane + 32 j of all.
struct Rows { uint4 chunks[TILE * CHUNKS / 32]; };
__device__ __forceinline__ int row_of_chunk(int j, int lane) {
    return 32 % CHUNKS ? (lane + 32 * j) / CHUNKS : lane / CHUNKS + j * (32 / CHUNKS);
}
__device__ __forceinline__ int column_of_chunk(int j, int lane) {
    return 8 * (32 % CHUNKS ? (lane + 32 * j) % CHUNKS : lane % CHUNKS);
}

// Rows past `last_row` are not read and become zeros.
__device__ __forceinline__ void load_rows(Rows& rows, const Cache& cache, const Place& place, int last_row, int lane) {
    if (WHOLE_TILES && 32 % CHUNKS == 0 && last_row >= TILE - 1) {
        // One address and one step: registers are scarce here.
        const KV* from = row_at(cache, place, row_of_chunk(0, lane)) + column_of_chunk(0, lane);
        const long long step = 32 / CHUNKS * (long long)cache.slot_stride;
        #pragma unroll
        for (int j = 0; j < TILE * CHUNKS / 32; j++, from += step) rows.chunks[j] = load_streaming(from);
    } else {
        #pragma unroll
        for (int j = 0; j < TILE * CHUNKS / 32; j++) {
            const int row = row_of_chunk(j, lane);
            const KV* from = row_at(cache, place, row) + column_of_chunk(j, lane);
            rows.chunks[j] = make_uint4(0, 0, 0, 0);
            if (row <= last_row) rows.chunks[j] = load_streaming(from);
        }
    }
}

template <bool IS_V> __device__ __forceinline__ void store_rows(char* slot, const Rows& rows, int lane) {
    #pragma unroll
    for (int j = 0; j < TILE * CHUNKS / 32; j++)
        *reinterpret_cast<uint4*>(slot + place_in_slot<IS_V>(row_of_chunk(j, lane), column_of_chunk(j, lane))) = rows.chunks[j];
}
