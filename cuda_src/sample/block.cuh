// Block-wide reductions, scans and sorts of one value per thread, for kWarps warps.
//
// Each contains block barriers: all threads of the block must call it. `scratch` holds kWarps
// values; successive calls may share it.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"

// Reduces x by op over the block. Every thread gets the result, with the operations in the same
// order.
template <int kWarps, typename T, typename Op>
__device__ __forceinline__ T block_reduce(T x, Op op, uint64_t* scratch) {
  T* warp_values = reinterpret_cast<T*>(scratch);
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x = op(x, __shfl_xor_sync(kFullMask, x, offset));
  }
  __syncthreads();  // SAFETY: the previous call may still be reading `scratch`.
  if (threadIdx.x % kWarpSize == 0) warp_values[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  T total = warp_values[0];
  for (int i = 1; i < kWarps; ++i) total = op(total, warp_values[i]);
  return total;
}

// Returns the largest x of the block to every thread; cheaper than block_reduce.
template <int kWarps>
__device__ __forceinline__ uint32_t block_max(uint32_t x, uint64_t* scratch) {
  uint32_t* warp_values = reinterpret_cast<uint32_t*>(scratch);
  x = __reduce_max_sync(kFullMask, x);
  __syncthreads();  // SAFETY: the previous call may still be reading `scratch`.
  if (threadIdx.x % kWarpSize == 0) warp_values[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return __reduce_max_sync(kFullMask, warp_values[threadIdx.x % kWarps]);
}

// Returns the sum of x over the threads up to and including this one; cheaper than
// block_inclusive_scan.
template <int kWarps>
__device__ __forceinline__ int block_inclusive_count(int x, uint64_t* scratch) {
  int* warp_values = reinterpret_cast<int*>(scratch);
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int below = __shfl_up_sync(kFullMask, x, offset);
    if (lane_idx >= offset) x += below;
  }
  __syncthreads();  // SAFETY: the previous call may still be reading `scratch`.
  if (lane_idx == kWarpSize - 1) warp_values[warp_idx] = x;
  __syncthreads();
  const int before = lane_idx < warp_idx ? warp_values[lane_idx % kWarps] : 0;
  return x + static_cast<int>(__reduce_add_sync(kFullMask, before));
}

template <typename T>
struct Max {
  __device__ __forceinline__ T operator()(T a, T b) const { return a < b ? b : a; }
};

template <typename T>
struct Sum {
  __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};

// Returns the sum of x over the threads up to and including this one; `total` is the sum over all.
template <int kWarps>
__device__ __forceinline__ uint64_t block_inclusive_scan(uint64_t x, uint64_t* scratch,
                                                         uint64_t* total) {
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const uint64_t below = __shfl_up_sync(kFullMask, x, offset);
    if (lane_idx >= offset) x += below;
  }
  __syncthreads();  // SAFETY: the previous call may still be reading `scratch`.
  if (lane_idx == kWarpSize - 1) scratch[warp_idx] = x;
  __syncthreads();
  uint64_t sum = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp_idx) x += sum;
    sum += scratch[i];
  }
  *total = sum;
  return x;
}

// Sorts list[0..n), whose entries are distinct, into sorted[0..n) in descending order: an entry's
// index is the number of larger entries. n is at most the number of threads in the block, which is
// a power of two.
__device__ __forceinline__ void block_sort_descending(const uint64_t* list, int n,
                                                      uint64_t* sorted) {
  int parts = kWarpSize;  // threads that share the comparisons of one entry
  while (parts > 1 && parts * n > static_cast<int>(blockDim.x)) parts /= 2;
  const int entry = threadIdx.x / parts;
  const uint64_t own = entry < n ? list[entry] : ~0ull;
  int rank = 0;
  for (int i = threadIdx.x % parts; i < n; i += parts) rank += list[i] > own;
  for (int offset = parts / 2; offset > 0; offset /= 2) {
    rank += __shfl_xor_sync(kFullMask, rank, offset);
  }
  if (entry < n && threadIdx.x % parts == 0) sorted[rank] = own;
  __syncthreads();
}
