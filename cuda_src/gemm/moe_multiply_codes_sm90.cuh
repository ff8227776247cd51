// The products of codes in moe_gemm_sm90.cu: wgmma sums a slab, which has one scale, and the sums
// times their scales are added in float: wgmma keeps some 14 bits of a sum of e4m3.
#pragma once

#include "gemm/moe_epilogue_sm90.cuh"
#include "gemm/wgmma_codes.cuh"

struct MoeMultiplier {
  MoeShared& smem;
  int num_slabs;
  bool is_gathered;

  // part = the products of slab d of a stage.
  template <int kN>
  __device__ __forceinline__ void start(int stage, int d, int warpgroup,
                                        float (&part)[kMmaTiles][kN / 2]) const {
    const unsigned w = smem_address(smem.w[stage]) + d * kSlabW;
    const uint64_t a = wgmma_descriptor(w + warpgroup * kMmaTiles * kMmaBytes);
    const uint64_t b = wgmma_descriptor(smem_address(smem.x[stage]) + d * kSlabX);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSlabRowBytes / 32; ++step)
#pragma unroll
      for (int j = 0; j < kMmaTiles; ++j)
        wgmma_codes<kN>(part[j], a + j * (kMmaBytes / 16) + step * 2, b + step * 2, step > 0);
    wgmma_commit();
  }

  // acc += part times the scales of slab d.
  template <int kN>
  __device__ __forceinline__ void add(int stage, int d, int warpgroup,
                                      float (&part)[kMmaTiles][kN / 2], MoeSums& acc) const {
    const float* scales = smem.scales[stage] + d * kSlabScales;
    float of_weight[kMmaTiles];
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) {
      of_weight[j] = scales[warpgroup * kMmaTiles + j];
      wgmma_pin(part[j]);
    }
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      const auto of_x = load_vec<float, 2>(scales + kFirstRowScale + i * 8 + threadIdx.x % 4 * 2);
#pragma unroll
      for (int j = 0; j < kMmaTiles; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          acc[j][4 * i + c] =
              fmaf(part[j][4 * i + c], of_weight[j] * of_x.v[c % 2], acc[j][4 * i + c]);
    }
  }

  // The sums of the first kN tokens; k in ascending order, whatever kN is.
  template <int kN>
  __device__ __forceinline__ void multiply(int warpgroup, PipelineState<kStages>& state,
                                           MoeSums& acc) const {
    state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
    float part[kMmaTiles][kN / 2];
#pragma unroll 1
    for (int slab = 0; slab < num_slabs; slab += kDepth) {
      mbarrier_wait(smem_address(&smem.full[state.stage]), state.phase);
      if (is_gathered) fence_async_proxy();  // SAFETY: cp.async wrote x, wgmma reads it.
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (d > 0 && slab + d >= num_slabs) break;
        start<kN>(state.stage, d, warpgroup, part);
        wgmma_wait<0>();
        add<kN>(state.stage, d, warpgroup, part, acc);
      }
      // SAFETY: every lane has read scales by ordinary loads.
      mbarrier_arrive(smem_address(&smem.empty[state.stage]));
      state.advance();
    }
  }

  // With the smallest of a few instructions that has room for `count` tokens.
  template <int kN = 16>
  __device__ __forceinline__ void few(int count, int warpgroup, PipelineState<kStages>& state,
                                      MoeSums& acc) const {
    if constexpr (kN < kTokens) {
      if (count > kN) return few<kN + 16>(count, warpgroup, state, acc);
    }
    multiply<kN>(warpgroup, state, acc);
  }
};

// As in moe_multiply_sm90.cuh.
__device__ __forceinline__ void multiply_few(int count, MoeShared& smem, int warpgroup,
                                             int num_slabs, bool is_gathered,
                                             PipelineState<kStages>& state, MoeSums& acc) {
  MoeMultiplier{smem, num_slabs, is_gathered}.few(count, warpgroup, state, acc);
}
