// The CUDA language on a CPU, enough of it to run this project's kernels as they are: a test vehicle, clear rather than fast.
//
// One block at a time, one fiber per CUDA thread. A fiber runs until it must wait for others (a barrier, a shuffle, an mma);
// then the next one runs. A block in which nobody can run is deadlocked: a barrier that some threads never reach, which on a GPU
// would hang or worse, is an error here. The order in which fibers and blocks take turns can be shuffled to expose a missing barrier.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// Shared memory lies in one section, so that it can be filled with NaN before each block. (The address sanitizer does not watch
// variables in named sections, so there it stays where it is.)
#if defined(__SANITIZE_ADDRESS__) || !defined(__ELF__)
#define __shared__ static
#else
#define SHARED_SECTION
#define __shared__ static __attribute__((section("cuda_shared")))
// Hidden: the section of this library, not of one that was loaded before it.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_cuda_shared[], __stop_cuda_shared[];
#endif
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(cuda::dynamic_shared)

static uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda {

constexpr int WARP = 32, MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 << 10, MAX_SHARED_BYTES = 227 << 10;

alignas(128) static unsigned char dynamic_shared[MAX_SHARED_BYTES];

// Where threads meet: the last to arrive opens it for all and advances the generation.
struct Rendezvous { int arrived, expected; unsigned generation; };

struct Warp {
    Rendezvous meeting;
    // What each lane brought, twice: a lane may bring its next word while another still reads this one.
    uint32_t words[2][WARP][16];
};

struct Fiber {
    jmp_buf context;
    uint3 index;
    bool done;
    const Rendezvous* waits_for;
    unsigned generation;  // of waits_for on arrival
    void* fake_stack;     // the address sanitizer's
};

static struct Block {
    Fiber fibers[MAX_THREADS];
    Warp warps[MAX_THREADS / WARP];
    Rendezvous barrier;
    int threads, order[MAX_THREADS], position, current;
    jmp_buf scheduler;
    char* stacks;
    void (*body)(void*);
    void* arguments;
    const void* scheduler_stack;
    size_t scheduler_stack_bytes;
    void* scheduler_fake_stack;
} block;

inline Fiber& self() { return block.fibers[block.current]; }
inline Warp& my_warp() { return block.warps[block.current / WARP]; }
inline int my_lane() { return block.current % WARP; }

// Leaves the fiber for the scheduler; the scheduler returns here when the fiber may go on.
inline void yield(bool finished = false) {
    Fiber& fiber = self();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(finished ? nullptr : &fiber.fake_stack, block.scheduler_stack, block.scheduler_stack_bytes);
#endif
    if (_setjmp(fiber.context) == 0) _longjmp(block.scheduler, 1);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &block.scheduler_stack, &block.scheduler_stack_bytes);
#endif
    (void)finished;
}

inline void meet(Rendezvous& place) {
    if (++place.arrived == place.expected) {
        place.arrived = 0;
        place.generation++;
        return;
    }
    Fiber& fiber = self();
    fiber.waits_for = &place;
    fiber.generation = place.generation;
    yield();
}

// Every lane brings `count` words and gets to read what all lanes brought.
inline const uint32_t (*exchange(const uint32_t* words, int count))[16] {
    Warp& warp = my_warp();
    uint32_t(*board)[16] = warp.words[warp.meeting.generation & 1];
    memcpy(board[my_lane()], words, count * sizeof(uint32_t));
    meet(warp.meeting);
    return board;
}

template <class T> inline T shuffle(unsigned mask, T value, int source) {
    static_assert(sizeof(T) == 4, "shuffles are of 4-byte values here");
    if (mask != 0xffffffffu) {
        fprintf(stderr, "cuda.h: a shuffle by part of a warp is not provided\n");
        abort();
    }
    uint32_t word;
    memcpy(&word, &value, 4);
    const auto board = exchange(&word, 1);
    memcpy(&value, board[source & (WARP - 1)], 4);
    return value;
}

static void enter() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack, &block.scheduler_stack_bytes);
#endif
    block.body(block.arguments);
    Fiber& fiber = self();
    fiber.done = true;
    // A thread that has returned no longer takes part in barriers.
    Rendezvous* places[] = {&block.barrier, &my_warp().meeting};
    for (Rendezvous* place : places)
        if (--place->expected > 0 && place->arrived == place->expected) {
            place->arrived = 0;
            place->generation++;
        }
    yield(true);
}

// xorshift: the shuffled orders must be the same on every machine.
inline uint64_t next_random(uint64_t& state) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

inline void shuffle_order(int* order, int count, uint64_t& random) {
    for (int i = 0; i < count; i++) order[i] = i;
    if (random != 0)
        for (int i = count - 1; i > 0; i--) {
            const int j = int(next_random(random) % (i + 1)), swapped = order[i];
            order[i] = order[j];
            order[j] = swapped;
        }
}

// Runs one block. Returns false if it deadlocked.
inline bool run_block(uint64_t& random) {
    const int threads = block.threads;
    if (block.stacks == nullptr) {
        block.stacks = static_cast<char*>(mmap(nullptr, STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (block.stacks == MAP_FAILED) { block.stacks = nullptr; return false; }
    }
    // All ones is NaN in every floating-point type: shared memory nobody wrote must not look like a number.
    memset(dynamic_shared, 0xff, sizeof dynamic_shared);
#if defined(SHARED_SECTION)
    if (__start_cuda_shared != nullptr) memset(__start_cuda_shared, 0xff, __stop_cuda_shared - __start_cuda_shared);
#endif
    block.barrier = {0, threads, 0};
    for (int w = 0; w * WARP < threads; w++)
        block.warps[w].meeting = {0, threads - w * WARP < WARP ? threads - w * WARP : WARP, 0};
    for (int i = 0; i < threads; i++) {
        Fiber& fiber = block.fibers[i];
        const unsigned x = i % blockDim.x, y = i / blockDim.x % blockDim.y, z = i / (blockDim.x * blockDim.y);
        fiber.index = {x, y, z};
        fiber.done = false;
        fiber.waits_for = nullptr;
        fiber.fake_stack = nullptr;
    }
    shuffle_order(block.order, threads, random);
    bool started[MAX_THREADS] = {};
    for (int left = threads; left > 0;) {
        bool moved = false;
        for (int position = 0; position < threads; position++) {
            const int i = block.order[position];
            Fiber& fiber = block.fibers[i];
            if (fiber.done || (fiber.waits_for && fiber.waits_for->generation == fiber.generation)) continue;
            moved = true;
            fiber.waits_for = nullptr;
            block.current = i;
            threadIdx = fiber.index;
#if defined(__SANITIZE_ADDRESS__)
            __sanitizer_start_switch_fiber(&block.scheduler_fake_stack, block.stacks + i * STACK_BYTES, STACK_BYTES);
#endif
            // Set before setjmp: what changes between setjmp and longjmp is lost if it lives in a register.
            const bool resume = started[i];
            started[i] = true;
            if (_setjmp(block.scheduler) == 0) {
                if (resume) _longjmp(fiber.context, 1);
                ucontext_t context;
                getcontext(&context);
                context.uc_stack.ss_sp = block.stacks + i * STACK_BYTES;
                context.uc_stack.ss_size = STACK_BYTES;
                context.uc_link = nullptr;
                makecontext(&context, enter, 0);
                setcontext(&context);
            }
#if defined(__SANITIZE_ADDRESS__)
            __sanitizer_finish_switch_fiber(block.scheduler_fake_stack, nullptr, nullptr);
#endif
            left -= block.fibers[block.current].done;
        }
        if (!moved) return false;
    }
    return true;
}

template <class... P, size_t... I> void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(arguments[I])...);
}

// Runs a grid. `arguments` are pointers to the kernel's parameters, as for cuLaunchKernel; `seed` 0 keeps the natural order of blocks
// and threads, any other shuffles both. Returns 0, or 1 if a block deadlocked.
template <class... P>
int launch(void (*kernel)(P...), const unsigned* grid, const unsigned* threads, void** arguments, uint64_t seed) {
    struct Bound { void (*kernel)(P...); void** arguments; } bound = {kernel, arguments};
    block.body = [](void* b) {
        const Bound& bound = *static_cast<Bound*>(b);
        call(bound.kernel, bound.arguments, std::index_sequence_for<P...>());
    };
    block.arguments = &bound;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads[0], threads[1], threads[2]};
    block.threads = int(threads[0] * threads[1] * threads[2]);
    const long long blocks = (long long)grid[0] * grid[1] * grid[2];
    // A step coprime to the number of blocks visits each once, without a table.
    unsigned long long step = 1, start = 0;
    if (seed != 0 && blocks > 1) {
        start = next_random(seed) % blocks;
        auto common = [](unsigned long long a, unsigned long long b) {
            while (b) { const auto rest = a % b; a = b; b = rest; }
            return a;
        };
        do step = next_random(seed) % blocks; while (common(step, blocks) != 1);
    }
    for (long long i = 0; i < blocks; i++) {
        const unsigned long long b = (start + i * step) % blocks;
        blockIdx = {unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]), unsigned(b / grid[0] / grid[1])};
        if (!run_block(seed)) return 1;
    }
    return 0;
}

}  // namespace cuda

inline void __syncthreads() { cuda::meet(cuda::block.barrier); }
inline void __syncwarp(unsigned = 0xffffffffu) { cuda::meet(cuda::my_warp().meeting); }
// Blocks and threads take turns on one core: memory is always in order.
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T> inline T __shfl_sync(unsigned mask, T x, int lane) { return cuda::shuffle(mask, x, lane); }
template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int bits) { return cuda::shuffle(mask, x, cuda::my_lane() ^ bits); }
template <class T> inline T __shfl_up_sync(unsigned mask, T x, int by) {
    const int lane = cuda::my_lane();
    return cuda::shuffle(mask, x, lane >= by ? lane - by : lane);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T x, int by) {
    const int lane = cuda::my_lane();
    return cuda::shuffle(mask, x, lane + by < cuda::WARP ? lane + by : lane);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    const uint32_t word = predicate != 0;
    const auto board = cuda::exchange(&word, 1);
    unsigned votes = 0;
    for (int lane = 0; lane < cuda::WARP; lane++) votes |= board[lane][0] << lane;
    return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

namespace cuda {
template <class To, class From> inline To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
}  // namespace cuda
inline float __int_as_float(int x) { return cuda::bits<float>(x); }
inline int __float_as_int(float x) { return cuda::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cuda::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return cuda::bits<unsigned>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }

// Byte i of the result is the byte of {a, b} that nibble i of the selector names (the sign-spreading bit is not provided).
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

template <class T> inline T __ldg(const T* address) { return *address; }
template <class T> inline T __ldcg(const T* address) { return *address; }
template <class T> inline void __stcg(T* address, T value) { *address = value; }
template <class T> inline T atomicAdd(T* address, T value) {
    const T old = *address;
    *address = old + value;
    return old;
}
