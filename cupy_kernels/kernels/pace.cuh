// Pacing: blocks that are ahead of the others hold back, so that all end together.
//
// Memory serves some blocks faster than others, by chance: on an H200, 64 rows of tiles (one for each warp of a block) take 113 to 121
// us, and while the last blocks catch up it idles. So the blocks of some columns count their rows in one word, and each looks at it
// once a row; a block that is ahead of their average asks for its next row a little later and leaves the memory to the others. It
// decides nothing but time, no block waits for another, and any number may stand in the word.
//
// Constants: PACED, whether a kernel does so.
#include "ptx.cuh"

// So many rows ahead of the average, and others have not even begun.
#define PACED_LEAD 4
#define HOLD_BACK_NANOSECONDS 400
// Words, 16 bytes used of 128, that the columns are dealt to: a single one would be too much in demand.
#define PACED_WORDS 8
#define PACED_STRIDE 32

struct Pace {
    unsigned* word;
    volatile unsigned* seen;  // the word as it was a row ago: 16 bytes of shared memory
    int blocks;               // that count in the word and have rows; 0: not paced
    bool counts;              // the block's rows, this thread
    int rows;
    bool ahead;

    // Before any row: `shares` of the batch have rows. The blocks of the first one begin to count anew; rows that others have counted
    // already are lost, one or none. What is in `seen` is to be 1 << 30, far more than rows can be: nobody is ahead before a look came.
    static __device__ Pace begin(unsigned* progress, unsigned* seen, int column, int columns, int shares, bool first) {
        const int index = column % PACED_WORDS, columns_of_word = (columns - 1 - index) / PACED_WORDS + 1;
        unsigned* word = progress + index * PACED_STRIDE;
        if (first && column < PACED_WORDS && threadIdx.x == 0) store_relaxed(word, 0u);
        return {word, seen, shares * columns_of_word, threadIdx.x == 0};
    }

    // Before the next row is asked for.
    __device__ void hold_back() const {
        if (PACED && ahead) __nanosleep(HOLD_BACK_NANOSECONDS);
    }
    // When it is under way.
    __device__ void count_row() {
        if (!PACED) return;
        rows++;
        add_relaxed_if(counts, word, 1);
        // Not waited for: any look that has come by then is good enough.
        copy_async_16_if(counts, const_cast<unsigned*>(seen), word);
    }
    // The look that has come was made a row ago.
    __device__ void compare() {
        if (!PACED) return;
        const int lead = (int)((rows - 1u) * blocks - *seen);
        ahead = 0 < lead && lead <= PACED_LEAD * blocks;
    }
    // Before the block ends: nothing is to be written to its shared memory any more.
    __device__ void finish() const {
        if (PACED && counts) wait_for_copies();
    }
};
