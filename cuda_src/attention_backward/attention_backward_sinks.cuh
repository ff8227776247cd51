// Gradient of attention sinks, shared by both tiers of attention_backward:
//
//   dsinks[h] = -sum over tokens t of exp(sinks[h] - lse[t, h]) * delta[t, h]
//
// Numerics: float. The sums have a fixed order: within a block, then over the blocks.
// Parallelisation: a block sums 256 tokens of 32 heads; the last block of these heads to end adds
// the blocks' sums.
#pragma once

#include "common/attention.cuh"

constexpr int kSinkTokens = 256;  // tokens per block

struct AttentionBackwardSinksParams {
  const float* sinks;  // (H,)
  const float* lse;    // (Tq, H) log-sum-exp of the forward pass, including the sink
  const float* delta;  // (Tq, H)
  float* partial;      // (gridDim.x, H) scratch: the sums of each block
  float* dsinks;       // (H,) output
  int* counter;        // (gridDim.y,) number of blocks that have ended; 0 before and after
  int total_q, num_heads;
};

// Adds the values of the threads of each lane, one per warp, in the order of the warps.
__device__ __forceinline__ float sum_over_warps(float x) {
  __shared__ float smem[8][32];
  const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
  __syncthreads();  // SAFETY: the previous call's values have been read.
  smem[warp_idx][lane_idx] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += smem[i][lane_idx];
  return sum;
}

extern "C" __global__ void __launch_bounds__(256)
    attention_backward_sinks(const __grid_constant__ AttentionBackwardSinksParams p) {
  __shared__ bool is_last;
  const int warp_idx = threadIdx.x / 32, head = blockIdx.y * 32 + threadIdx.x % 32;
  const bool exists = head < p.num_heads;
  const float sink = exists ? p.sinks[head] : -kInf;
  const int begin = blockIdx.x * kSinkTokens, end = min(begin + kSinkTokens, p.total_q);
  float sum = 0.0f;
  for (int token = begin + warp_idx; token < end && sink != -kInf; token += 8) {
    const int64_t row = static_cast<int64_t>(token) * p.num_heads + head;
    sum -= exp2_approx((sink - p.lse[row]) * kLog2E) * p.delta[row];
  }
  sum = sum_over_warps(sum);
  if (exists && warp_idx == 0)
    p.partial[static_cast<int64_t>(blockIdx.x) * p.num_heads + head] = sum;

  // SAFETY: the fence publishes the sums before the count, so the block that counts last sees all.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(p.counter + blockIdx.y, 1) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  sum = 0.0f;
  for (int block = warp_idx; block < gridDim.x && exists; block += 8)
    sum += __ldcg(p.partial + static_cast<int64_t>(block) * p.num_heads + head);
  sum = sum_over_warps(sum);
  if (exists && warp_idx == 0) p.dsinks[head] = sum;
  if (threadIdx.x == 0) p.counter[blockIdx.y] = 0;
}
