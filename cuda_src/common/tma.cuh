// TMA (sm_90 up): copies of boxes between shared memory and arrays described by tensor maps.
//
// Public: sm_90 up.
#pragma once

#include "common/mbarrier.cuh"

// A CUtensorMap, encoded on the host (`call.tensor_map` of kernels.define). A kernel takes it as a
// parameter `const __grid_constant__ TensorMap map`, or first in a parameter struct: TMA requires
// its address in parameter or constant space, aligned to 64 bytes.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// ---- to shared memory ---------------------------------------------------------------------------

// Fetches the map itself, so that the first copy need not wait for it. One thread calls it.
__device__ __forceinline__ void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts a copy of the box at (column, row) of a matrix to shared memory, counted on an mbarrier;
// out-of-bounds elements become zero, and count too. Both may be negative, but `column` must be a
// multiple of 16 bytes: CUDA reports an illegal instruction otherwise. `to` is a multiple of 128,
// of 1024 with the 128-byte swizzle. One thread calls it, after mbarrier_arrive_expect_tx of the
// box's bytes.
__device__ __forceinline__ void tma_load_2d(unsigned to, const TensorMap* map, int column, int row,
                                            unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Multicasts the box to every block of the cluster whose bit is set in `blocks`: it is written to
// the same offset in each, and counted on the mbarrier at the same offset in each.
__device__ __forceinline__ void tma_load_2d_multicast(unsigned to, const TensorMap* map, int column,
                                                      int row, unsigned barrier,
                                                      unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// The same for three- and four-dimensional arrays; x indexes the contiguous axis.
__device__ __forceinline__ void tma_load_3d(unsigned to, const TensorMap* map, int x, int y, int z,
                                            unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(unsigned to, const TensorMap* map, int x, int y, int z,
                                            int w, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d_multicast(unsigned to, const TensorMap* map, int x,
                                                      int y, int z, int w, unsigned barrier,
                                                      unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "h"(blocks)
      : "memory");
}

// Fetches the box to L2. One thread calls it; safe at any time, even before the last writer of the
// data has ended.
__device__ __forceinline__ void tma_prefetch_2d(const TensorMap* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(column),
               "r"(row)
               : "memory");
}
__device__ __forceinline__ void tma_prefetch_4d(const TensorMap* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// ---- from shared memory ------------------------------------------------------------------------

// Starts a copy of a box from shared memory to (column, row) of a matrix; out-of-bounds elements
// are not stored. One thread calls it, and then bulk_commit. The threads that wrote the box must
// have called fence_async_proxy, and then a barrier.
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, int column, int row,
                                             unsigned from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
// The same for a three-dimensional array; x indexes the contiguous axis.
__device__ __forceinline__ void tma_store_3d(const TensorMap* map, int x, int y, int z,
                                             unsigned from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(from)
      : "memory");
}
// Closes the group of this thread's stores since the last commit.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the last kPending groups of this thread have read shared memory, which may
// then be overwritten.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all groups of this thread have completed and their writes are visible.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
