// Sums and maxima over a warp and over several warps of a block.
//
// Public: sm_80 up.
#pragma once

// Threads of a warp, and the mask of all its lanes.
constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// The sum or the maximum over the 32 lanes of a warp, in every lane. All lanes must call it. The
// order of the sum is fixed, so all lanes get the same bits. warp_max ignores NaN, as fmaxf does.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(kFullMask, x, offset);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, offset));
  return x;
}

// The sum or the maximum over the kWarps warps of a one-dimensional block, in every thread. All
// threads must call it: it contains two block barriers, so `smem` (kWarps floats of shared memory)
// may be used again at once. Sums are added in a fixed order.
template <int kWarps>
__device__ __forceinline__ float block_sum(float x, float* smem) {
  x = warp_sum(x);
  if constexpr (kWarps == 1) return x;
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  __syncthreads();  // SAFETY: threads may still be reading `smem` from the previous call.
  if (lane_idx == 0) smem[warp_idx] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i)
    total += smem[i];  // same order in every thread, hence the same sum
  return total;
}
template <int kWarps>
__device__ __forceinline__ float block_max(float x, float* smem) {
  x = warp_max(x);
  if constexpr (kWarps == 1) return x;
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  __syncthreads();  // SAFETY: threads may still be reading `smem` from the previous call.
  if (lane_idx == 0) smem[warp_idx] = x;
  __syncthreads();
  float largest = smem[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) largest = fmaxf(largest, smem[i]);
  return largest;
}
