// Asynchronous copies of a thread, 16 bytes each. They are read at once and arrive when they are waited for, not before: where a wait
// is missing, what it should have brought is not there.
#pragma once
#include <cstdlib>
#include <cstring>

namespace cuda {

class Copies {
    static constexpr int MOST = 16;
    struct Copy { void* to; unsigned char bytes[16]; } under_way[MOST];
    int asked = 0, committed = 0;

    void arrive(int count) {
        for (int i = 0; i < count; i++) memcpy(under_way[i].to, under_way[i].bytes, 16);
        for (int i = count; i < asked; i++) under_way[i - count] = under_way[i];
        asked -= count, committed = 0;
    }

public:
    void ask(void* to, const void* from) {
        if (asked == MOST) abort();
        under_way[asked].to = to;
        memcpy(under_way[asked++].bytes, from, 16);
    }
    void commit() { committed = asked; }
    void wait_for_committed() { arrive(committed); }
    void wait_for_all() { arrive(asked); }
};

}  // namespace cuda
