// Sums and maxima over a warp and over several warps of a block.
#pragma once

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

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

// The sum over the kWarps warps of a block, in every thread. It contains two block barriers, so all
// threads must call it; `smem` holds kWarps floats.
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
