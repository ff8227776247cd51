// Asynchronous copies from global to shared memory (cp.async, sm_80 and up).
//
// Copies are collected into groups: cp_async_commit() closes one, and cp_async_wait<N>() waits
// until at most the N newest groups of the calling thread are still in flight.
// SAFETY: a wait covers the calling thread's own copies only. A __syncthreads() must follow the
// wait before another thread reads the data, and must separate a buffer's last read from the next
// cp_async_16 into it.
//
// Public: sm_80 up.
#pragma once

#include "common/types.cuh"

// The 32-bit shared-memory address that PTX instructions take, of a pointer to shared memory.
__device__ __forceinline__ uint32_t smem_address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// Starts a copy of 16 bytes, or of 16 zero bytes when !valid (then `gmem` is not read). Both
// addresses must be multiples of 16. It bypasses L1: the data will be read from shared memory.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* gmem, bool valid = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(smem), "l"(gmem),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_16(void* smem, const void* gmem, bool valid = true) {
  cp_async_16(smem_address(smem), gmem, valid);
}

// Starts a copy of 4 bytes; both addresses must be multiples of 4.
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* gmem) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(smem), "l"(gmem) : "memory");
}

// Closes the group of this thread's copies since the last commit; it may be empty.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most the N newest groups of this thread are in flight. Its own copies have then
// landed; other threads see them after a barrier.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}
