// Reductions, scans and sorts of one value per thread over a whole block of kWarps warps.
//
// Each contains block barriers: all threads of the block must call it. `scratch` holds kWarps
// values and may be shared by calls that follow each other.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"

// op over the block; every thread gets it, from the same order of operations.
template <int kWarps, typename T, typename Op>
__device__ __forceinline__ T block_reduce(T x, Op op, uint64_t* scratch) {
  T* slots = reinterpret_cast<T*>(scratch);
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x = op(x, __shfl_xor_sync(kFullMask, x, offset));
  }
  __syncthreads();  // SAFETY: the slots may still be read by the call before.
  if (threadIdx.x % kWarpSize == 0) slots[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  T total = slots[0];
  for (int i = 1; i < kWarps; ++i) total = op(total, slots[i]);
  return total;
}

template <typename T>
struct Max {
  __device__ __forceinline__ T operator()(T a, T b) const { return a < b ? b : a; }
};

template <typename T>
struct Min {
  __device__ __forceinline__ T operator()(T a, T b) const { return b < a ? b : a; }
};

template <typename T>
struct Sum {
  __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};

// Sum of x over the threads up to and including this one; `total` is that over all.
template <int kWarps>
__device__ __forceinline__ uint64_t block_inclusive_scan(uint64_t x, uint64_t* scratch,
                                                         uint64_t* total) {
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const uint64_t below = __shfl_up_sync(kFullMask, x, offset);
    if (lane_idx >= offset) x += below;
  }
  __syncthreads();  // SAFETY: the slots may still be read by the call before.
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

// Sort list[0..n) descending; room for the next power of two, at most twice the block's threads.
__device__ __forceinline__ void block_sort_descending(uint64_t* list, int n) {
  int size = 1;
  while (size < n) size *= 2;
  for (int i = n + threadIdx.x; i < size; i += blockDim.x) list[i] = 0;
  __syncthreads();
  for (int span = 2; span <= size; span *= 2) {
    for (int step = span / 2; step > 0; step /= 2) {
      const int low = 2 * threadIdx.x - (threadIdx.x & (step - 1));
      if (low + step < size) {
        const uint64_t a = list[low], b = list[low + step];
        if ((a < b) == ((low & span) == 0)) {
          list[low] = b;
          list[low + step] = a;
        }
      }
      __syncthreads();
    }
  }
}
