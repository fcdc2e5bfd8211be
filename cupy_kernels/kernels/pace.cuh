// Pacing: blocks that are ahead of the others hold back, so that all end together.
//
// Memory serves some blocks faster than others, by chance: on an H200, 64 rows of tiles (one for each warp of a block) take 113 to 121
// us, and while the last blocks catch up it idles. So the blocks count their rows in some words, and each looks at one of them once a
// row; a block that is ahead of the average asks for its next row a little later and leaves the memory to the others. It decides
// nothing but time, no block waits for another, and any number may stand in the words.
//
// Constants: PACED, whether a kernel does so.
#include "ptx.cuh"

// So many rows ahead of the average, and others have not even begun.
#define PACED_LEAD 4
#define HOLD_BACK_NANOSECONDS 400
// Words, 16 bytes used of 128: a single one would be too much in demand. A block counts in all of them in turn, so that a word stands
// for all blocks. If each kept to one, those of a word would stay together and the words drift apart.
#define PACED_WORDS 8
#define PACED_STRIDE 32
// What stands for a look that has not come yet: more than rows can be, and so are PACED_WORDS times as many.
#define NO_LOOK_YET (1u << 28)

struct Pace {
    unsigned* words;
    volatile unsigned* seen;  // a word as it was a row ago: 16 bytes of shared memory
    int blocks;               // that have rows; 0: not paced
    int block;                // this one of them
    bool counts;              // the block's rows, this thread
    int rows;
    bool ahead;

    // Before any row. The first block begins to count anew; rows that others have counted already are lost, one or none. What is in
    // `seen` is to be NO_LOOK_YET: nobody is ahead then.
    static __device__ Pace begin(unsigned* words, unsigned* seen, int blocks, int block) {
        if (block == 0 && threadIdx.x < PACED_WORDS) store_relaxed(words + threadIdx.x * PACED_STRIDE, 0u);
        return {words, seen, blocks, block, threadIdx.x == 0};
    }

    // Before the next row is asked for.
    __device__ void hold_back() const {
        if (PACED && ahead) __nanosleep(HOLD_BACK_NANOSECONDS);
    }
    // When it is under way.
    __device__ void count_row() {
        if (!PACED) return;
        rows++;
        unsigned* word = words + (unsigned)(block + rows) % PACED_WORDS * PACED_STRIDE;
        add_relaxed_if(counts, word, 1);
        // Not waited for: any look that has come by then is good enough.
        copy_async_16_if(counts, const_cast<unsigned*>(seen), word);
    }
    // The look that has come was made a row ago. A word has one in PACED_WORDS of the rows that all blocks have counted.
    __device__ void compare() {
        if (!PACED) return;
        const int lead = (int)((rows - 1u) * blocks - PACED_WORDS * *seen);
        ahead = 0 < lead && lead <= PACED_LEAD * blocks;
    }
    // Before the block ends: nothing is to be written to its shared memory any more.
    __device__ void finish() const {
        if (PACED && counts) wait_for_copies();
    }
};
