// Instructions that CUDA C++ has no operator for, one wrapper each. host/ptx.cuh gives each a plain C++ body.

// 2^x, at most 2 ulp; 2^-inf = 0, NaN -> NaN; results below 2^-126 are flushed to zero.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 16 bytes of read-only global memory, not kept in L1: every byte of K and V is used once. Address 16-byte aligned.
__device__ __forceinline__ uint4 load_streaming(const void* address) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(address));
    return r;
}

// 16, 8 or 4 bytes of shared memory, read where it stands: a compiler that knows them constant would keep them in registers.
__device__ __forceinline__ uint4 load_shared_16(const void* address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"((unsigned)__cvta_generic_to_shared(address)) : "memory");
    return r;
}
__device__ __forceinline__ uint2 load_shared_8(const void* address) {
    uint2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(r.x), "=r"(r.y) : "r"((unsigned)__cvta_generic_to_shared(address)) : "memory");
    return r;
}
__device__ __forceinline__ unsigned load_shared_4(const void* address) {
    unsigned r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"((unsigned)__cvta_generic_to_shared(address)) : "memory");
    return r;
}

// threadIdx.x % 32 of a one-dimensional block, read anew each time: kept in a register through a long loop, it would cost a spill.
__device__ __forceinline__ int lane_index() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// D += A B on a warp: A 16x16 (rows), B 16x8 (columns), 16-bit; D 16x8 float32. With g = lane / 4, t = lane % 4:
//   a[0] = A[g][2t..2t+1], a[1] = A[g+8][2t..], a[2] = A[g][2t+8..], a[3] = A[g+8][2t+8..]
//   b[0] = B[2t..2t+1][g], b[1] = B[2t+8..][g];  d[0..1] = D[g][2t..2t+1], d[2..3] = D[g+8][2t..]
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8x8 matrix of 16-bit elements held by a warp: lane 4r + c holds [r][2c..2c+1] before and after.
__device__ __forceinline__ unsigned transpose_8x8(unsigned x) {
    unsigned r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

// What one block writes for another while both run: no order but that of each word by itself. 16 or 8 bytes, aligned to as many.
__device__ __forceinline__ void store_relaxed(float4* address, float4 x) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
__device__ __forceinline__ void store_relaxed(float2* address, float2 x) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" :: "l"(address), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ float4 load_relaxed(const float4* address) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(address) : "memory");
    return x;
}
__device__ __forceinline__ float2 load_relaxed(const float2* address) {
    float2 x;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_relaxed(unsigned* address, unsigned x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(address), "r"(x) : "memory");
}
// What is called ..._if has a predicate and no branch: ptxas schedules nothing across one.
__device__ __forceinline__ void add_relaxed_if(bool wanted, unsigned* address, unsigned x) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p red.relaxed.gpu.global.add.u32 [%1], %2; }"
                 :: "r"((unsigned)wanted), "l"(address), "r"(x) : "memory");
}
// 16 bytes, aligned to as many, into shared memory at some later time. It takes no register, and what uses registers does not wait.
// Committed copies can be waited for without those that come after them.
__device__ __forceinline__ void copy_async_16(void* to_shared, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"((unsigned)__cvta_generic_to_shared(to_shared)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_16_if(bool wanted, void* to_shared, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p cp.async.cg.shared.global [%1], [%2], 16; }"
                 :: "r"((unsigned)wanted), "r"((unsigned)__cvta_generic_to_shared(to_shared)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// For this thread's.
__device__ __forceinline__ void wait_for_committed_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Nothing else is ordered by it, so that what is computed may move past it.
__device__ __forceinline__ int load_relaxed(const int* address) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(address));
    return x;
}

// To be said between two looks at what another block has not written yet. (A CPU runs one block at a time: there it never will be.)
__device__ __forceinline__ void look_again() {}

// Programmatic dependent launch (sm_90): a kernel launched that way begins before the one in front of it has ended. What it reads
// of others' memory before this returns may be out of date, and it may write none. Then all that was launched before has ended, and
// what that wrote is seen.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Meanwhile it may ask for memory into L2, in lines of 128 bytes: what is written to them later is seen there.
__device__ __forceinline__ void prefetch(const void* address, int bytes) {
#if __CUDA_ARCH__ >= 900
    for (int i = 0; i < bytes; i += 128) asm volatile("prefetch.global.L2 [%0];" :: "l"(static_cast<const char*>(address) + i));
#endif
}
// Once all blocks have said so or ended, the next launch may begin: its blocks take the places that are free or become so.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Computed here, beside what else there is to do: a compiler would move it behind the branch where it is used.
__device__ __forceinline__ float computed_here(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

// Shared memory whose size the launch decides.
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
