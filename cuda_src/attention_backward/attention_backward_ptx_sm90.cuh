// PTX that only attention_backward_sm90 uses: bulk reductions into global memory, ordering of the
// blocks that add, and two forms of wgmma.
#pragma once

#include "common/attention_sm90.cuh"

// ---- reductions in global memory ---------------------------------------------------------------

// Asynchronously adds `bytes` bytes of floats in shared memory to global memory; a commit must
// follow.
__device__ __forceinline__ void bulk_add(void* to, unsigned from, unsigned bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

// Orders this thread's ordinary loads and stores with bulk-copy accesses, in all state spaces.
__device__ __forceinline__ void fence_proxy_all() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void add_release(int* to, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// ---- wgmma ------------------------------------------------------------------------------------
//
// The first wgmma of a sum has its accumulators as outputs only. If they were inputs too, as in
// `wgmma`, ptxas would see instructions that define them while wgmma runs, and would serialise
// every wgmma (warning C7510).

#define ENGINE_F(i)                                                                     \
  "=f"(acc[i]), "=f"(acc[i + 1]), "=f"(acc[i + 2]), "=f"(acc[i + 3]), "=f"(acc[i + 4]), \
      "=f"(acc[i + 5]), "=f"(acc[i + 6]), "=f"(acc[i + 7])
#define ENGINE_F64 ENGINE_F(0), ENGINE_F(8), ENGINE_F(16), ENGINE_F(24)
#define ENGINE_F128 ENGINE_F64, ENGINE_F(32), ENGINE_F(40), ENGINE_F(48), ENGINE_F(56)

// acc (64 x N) = (_first) or += (_next) A (64 x 16) B (16 x N). `transposed` 0: k is contiguous in
// both operands; 1: A's 64 rows and B's N columns are contiguous (wgmma_descriptor_transposed).
#define ENGINE_WGMMA_PAIR(NAME, N, a, b, transposed)                                    \
  __device__ __forceinline__ void NAME##_first(float (&acc)[N / 2], uint64_t desc_a,    \
                                               uint64_t desc_b) {                       \
    asm volatile(                                                                       \
        "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                                      \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16" ENGINE_WGMMA_TYPES "{" ENGINE_L##N \
        "}, %" #a ", %" #b ", p, 1, 1, " #transposed ", " #transposed ";\n}"            \
        : ENGINE_F##N                                                                   \
        : "l"(desc_a), "l"(desc_b));                                                    \
  }                                                                                     \
  __device__ __forceinline__ void NAME##_next(float (&acc)[N / 2], uint64_t desc_a,     \
                                              uint64_t desc_b) {                        \
    asm volatile(                                                                       \
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                      \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16" ENGINE_WGMMA_TYPES "{" ENGINE_L##N \
        "}, %" #a ", %" #b ", p, 1, 1, " #transposed ", " #transposed ";\n}"            \
        : ENGINE_O##N                                                                   \
        : "l"(desc_a), "l"(desc_b));                                                    \
  }
ENGINE_WGMMA_PAIR(wgmma_rows, 64, 32, 33, 0)
ENGINE_WGMMA_PAIR(wgmma_rows, 128, 64, 65, 0)
ENGINE_WGMMA_PAIR(wgmma_columns, 64, 32, 33, 1)
