// One block at a time, one fiber per CUDA thread. A fiber runs until it must wait for others (a barrier, a shuffle, an mma);
// then the next one runs. A block in which nobody can run is deadlocked: a barrier that some threads never reach, which on a GPU
// would hang or worse, is an error here. The order in which fibers and blocks take turns can be shuffled to expose a missing barrier.
// A kernel whose blocks wait for blocks of smaller blockIdx.z defines WAITS_FOR_EARLIER_BLOCKS, and has them run in that order.
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
#include "copies.h"
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

struct uint3 { unsigned x, y, z; };
static uint3 threadIdx, blockIdx, blockDim, gridDim;

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
    bool started;  // has a context; a fiber that is done goes on with the next block
    bool done;
    const Rendezvous* waits_for;
    unsigned generation;  // of waits_for on arrival
    void* fake_stack;     // the address sanitizer's
    Copies copies;
};

static struct Block {
    Fiber fibers[MAX_THREADS];
    Warp warps[MAX_THREADS / WARP];
    Rendezvous barrier;
    int threads, order[MAX_THREADS], current;
    unsigned shared_bytes;
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
inline void yield() {
    Fiber& fiber = self();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fiber.fake_stack, block.scheduler_stack, block.scheduler_stack_bytes);
#endif
    if (_setjmp(fiber.context) == 0) _longjmp(block.scheduler, 1);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &block.scheduler_stack, &block.scheduler_stack_bytes);
#endif
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

// What is waited for can't come: the block will be found deadlocked.
inline void wait_forever() {
    static const Rendezvous never = {0, 1, 0};
    self().waits_for = &never;
    self().generation = never.generation;
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
    while (true) {
        block.body(block.arguments);
        self().done = true;
        // A thread that has returned no longer takes part in barriers.
        for (Rendezvous* place : {&block.barrier, &my_warp().meeting})
            if (--place->expected > 0 && place->arrived == place->expected) {
                place->arrived = 0;
                place->generation++;
            }
        yield();
    }
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
    memset(dynamic_shared, 0xff, block.shared_bytes);
#if defined(SHARED_SECTION)
    if (__start_cuda_shared != nullptr) memset(__start_cuda_shared, 0xff, __stop_cuda_shared - __start_cuda_shared);
#endif
    block.barrier = {0, threads, 0};
    for (int w = 0; w * WARP < threads; w++)
        block.warps[w].meeting = {0, threads - w * WARP < WARP ? threads - w * WARP : WARP, 0};
    for (int i = 0; i < threads; i++) {
        Fiber& fiber = block.fibers[i];
        fiber.index = {unsigned(i), 0, 0}, fiber.done = false, fiber.waits_for = nullptr, fiber.copies = {};
    }
    shuffle_order(block.order, threads, random);
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
            const bool resume = fiber.started;
            fiber.started = true;
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
        if (!moved) {
            // Stuck in the middle of a kernel: these contexts are of no use to another block.
            for (int i = 0; i < threads; i++) block.fibers[i].started = false;
            return false;
        }
    }
    return true;
}

// CuPy compiles every RawKernel with -ftz=true: float32 arithmetic reads and writes subnormals as zero. So does this while it lives.
struct FlushSubnormals {
#if defined(__SSE2__)
    const unsigned before = _mm_getcsr();
    FlushSubnormals() { _mm_setcsr(before | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    uint64_t before;
    FlushSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" : : "r"(before | 1 << 24));
    }
    ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#endif
};

template <class... P, size_t... I> void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(arguments[I])...);
}

// Runs a grid of blocks of `threads` x 1 x 1. `arguments` are pointers to the kernel's parameters, as for cuLaunchKernel; `seed` 0
// keeps the natural order of blocks and threads, any other shuffles both, but for the layers of a kernel `in_layers`: all blocks of one
// blockIdx.z run before those of the next. Returns 0, or 1 if a block deadlocked.
template <class... P>
int launch(void (*kernel)(P...), const unsigned* grid, unsigned threads, unsigned shared_bytes, void** arguments, uint64_t seed,
           bool in_layers) {
    struct Bound { void (*kernel)(P...); void** arguments; } bound = {kernel, arguments};
    block.body = [](void* b) {
        const Bound& bound = *static_cast<Bound*>(b);
        call(bound.kernel, bound.arguments, std::index_sequence_for<P...>());
    };
    block.arguments = &bound;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    block.threads = int(threads);
    block.shared_bytes = shared_bytes;
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(dynamic_shared, shared_bytes);
    ASAN_POISON_MEMORY_REGION(dynamic_shared + shared_bytes, sizeof dynamic_shared - shared_bytes);
#endif
    const unsigned long long layer = (unsigned long long)grid[0] * grid[1], blocks = layer * grid[2];
    // A step coprime to the number of blocks visits each once, without a table.
    const unsigned long long turn = in_layers ? layer : blocks;
    unsigned long long step = 1, start = 0;
    if (seed != 0 && turn > 1) {
        start = next_random(seed) % turn;
        auto common = [](unsigned long long a, unsigned long long b) {
            while (b) { const auto rest = a % b; a = b; b = rest; }
            return a;
        };
        do step = next_random(seed) % turn; while (common(step, turn) != 1);
    }
    const FlushSubnormals flush;
    for (unsigned long long i = 0; i < blocks; i++) {
        const unsigned long long b = i / turn * turn + (start + i % turn * step) % turn;
        blockIdx = {unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]), unsigned(b / layer)};
        if (!run_block(seed)) return 1;
    }
    return 0;
}

}  // namespace cuda
