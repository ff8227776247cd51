// Products of codes in moe_gemm_sm90.cu: wgmma sums over a slab, which has one scale per row, and
// the sums times their scales are added in float, because wgmma keeps only about 14 bits of a sum
// of e4m3 products.
#pragma once

#include "moe_gemm/moe_epilogue_sm90.cuh"
#include "common/wgmma_codes.cuh"

static_assert(kDepth == 1, "a stage is a slab");

struct MoeMultiplier {
  MoeShared& smem;
  int num_slabs;
  bool is_gathered;

  // part = the products of one m-tile in a stage.
  template <int kN>
  __device__ __forceinline__ void start(int stage, int tile, float (&part)[kN / 2]) const {
    const unsigned w = smem_address(smem.w[stage]) + tile * kMmaBytes;
    const uint64_t a = wgmma_descriptor(w);
    const uint64_t b = wgmma_descriptor(smem_address(smem.x[stage]));
#pragma unroll
    for (int step = 0; step < kSlabRowBytes / 32; ++step)
      wgmma_codes<kN>(part, a + step * 2, b + step * 2, step > 0);
    wgmma_commit();
  }

  // acc += part times the scales.
  template <int kN>
  __device__ __forceinline__ void add(int stage, int tile, float (&part)[kN / 2],
                                      float (&acc)[kTokens / 2]) const {
    const float* scales = smem.scales[stage];
    const float of_weight = scales[tile];
    wgmma_pin(part);
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      const auto of_x = load_vec<float, 2>(scales + kFirstRowScale + i * 8 + threadIdx.x % 4 * 2);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        acc[4 * i + c] = fmaf(part[4 * i + c], of_weight * of_x.v[c % 2], acc[4 * i + c]);
    }
  }

  // SAFETY: every lane arrives, because it has read scales of the stage by ordinary loads.
  __device__ __forceinline__ void release(int stage) const {
    mbarrier_arrive(smem_address(&smem.empty[stage]));
  }

  __device__ __forceinline__ void wait(const PipelineState<kStages>& state) const {
    mbarrier_wait(smem_address(&smem.full[state.stage]), state.phase);
    if (is_gathered) fence_async_proxy();  // SAFETY: cp.async wrote x, wgmma reads it.
  }

  // Computes the first kN tokens' sums, in ascending order of k for every kN. The first m-tile's
  // sums are added while wgmma multiplies the second.
  template <int kN>
  __device__ __forceinline__ void multiply(int warpgroup, PipelineState<kStages>& state,
                                           MoeSums& acc) const {
    state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
    const int tile = warpgroup * kMmaTiles;
    float part[kMmaTiles][kN / 2];
#pragma unroll 1
    for (int slab = 0; slab < num_slabs; ++slab) {
      wait(state);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < kMmaTiles; ++j) start<kN>(state.stage, tile + j, part[j]);
      if constexpr (kMmaTiles > 1) {
        wgmma_wait<1>();
        add<kN>(state.stage, tile, part[0], acc[0]);
      }
      wgmma_wait<0>();
      add<kN>(state.stage, tile + kMmaTiles - 1, part[kMmaTiles - 1], acc[kMmaTiles - 1]);
      release(state.stage);
      state.advance();
    }
  }

  // Picks the smallest of a few instruction widths that covers `count` tokens.
  template <int kN = 16>
  __device__ __forceinline__ void few(int count, int warpgroup, PipelineState<kStages>& state,
                                      MoeSums& acc) const {
    if constexpr (kN < kTokens) {
      if (count > kN) return few<kN + 16>(count, warpgroup, state, acc);
    }
    multiply<kN>(warpgroup, state, acc);
  }
};

// See moe_multiply_sm90.cuh.
__device__ __forceinline__ void multiply_few(int count, MoeShared& smem, int warpgroup,
                                             int num_slabs, const MoeEpilogue& e,
                                             PipelineState<kStages>& state, MoeSums& acc) {
  MoeMultiplier{smem, num_slabs, !e.scatters}.few(count, warpgroup, state, acc);
}
