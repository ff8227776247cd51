// Products of scalar_t weights in moe_gemm_sm90.cu: wgmma on the stages of the ring, both operands
// in shared memory.
#pragma once

#include "moe_gemm/moe_epilogue_sm90.cuh"

// Lets the producer refill a stage.
__device__ __forceinline__ void release(MoeShared& smem, int stage) {
  if (threadIdx.x % 128 == 0) mbarrier_arrive(smem_address(&smem.empty[stage]));
}

// Computes the first kN tokens' sums, in ascending steps of 16 along k for every kN.
template <int kN>
__device__ __forceinline__ void multiply(MoeShared& smem, int warpgroup, int num_slabs,
                                         bool is_gathered, PipelineState<kStages>& state,
                                         MoeSums& acc) {
  const unsigned w = smem_address(smem.w[0]) + warpgroup * kMmaTiles * kMmaBytes;
  const unsigned x = smem_address(smem.x[0]);
  state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
  int last = 0;
#pragma unroll 1
  for (int slab = 0; slab < num_slabs; slab += kDepth) {
    mbarrier_wait(smem_address(&smem.full[state.stage]), state.phase);
    if (is_gathered) fence_async_proxy();  // SAFETY: cp.async wrote x, wgmma reads it.
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (d > 0 && slab + d >= num_slabs) break;
      const unsigned tile_w = w + state.stage * kStageW + d * kSlabW;
      const uint64_t a =
          kTransposed ? wgmma_descriptor_transposed(tile_w, kMmaBytes) : wgmma_descriptor(tile_w);
      const uint64_t b = wgmma_descriptor(x + state.stage * kStageX + d * kSlabX);
#pragma unroll
      for (int step = 0; step < kSlabK / 16; ++step)
#pragma unroll
        for (int j = 0; j < kMmaTiles; ++j)
          wgmma<kN, kTransposed>(reinterpret_cast<float (&)[kN / 2]>(acc[j]),
                                 a + j * (kMmaBytes / 16) + step * (kTransposed ? 128 : 2),
                                 b + step * 2, slab > 0 || d > 0 || step > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the previous stage has been read
    if (slab > 0) release(smem, last);
    last = state.stage;
    state.advance();
  }
  wgmma_wait<0>();
  release(smem, last);
#pragma unroll
  for (int j = 0; j < kMmaTiles; ++j) wgmma_pin(acc[j]);
}

// Picks the smallest instruction width that covers `count` tokens.
template <int kN = 16>
__device__ __forceinline__ void multiply_few(int count, MoeShared& smem, int warpgroup,
                                             int num_slabs, const MoeEpilogue& e,
                                             PipelineState<kStages>& state, MoeSums& acc) {
  if constexpr (kN < kTokens) {
    if (count > kN) return multiply_few<kN + 16>(count, smem, warpgroup, num_slabs, e, state, acc);
  }
  multiply<kN>(smem, warpgroup, num_slabs, !e.scatters, state, acc);
}
