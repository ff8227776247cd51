// Barriers of some of a block's warps.
//
// Public: sm_80 up.
#pragma once

// Named barrier `id` of the block, 1 to 15 (0 is __syncthreads). It completes once kThreads threads
// have arrived; `sync` waits for completion, `arrive` does not.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
