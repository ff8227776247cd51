// The products of quantized weights in moe_gemm_sm90.cu: codes become fragments in registers while
// wgmma multiplies those of the steps before with the rows of x in shared memory.
#pragma once

#include "gemm/moe_epilogue_sm90.cuh"
#include "common/wgmma_weights.cuh"

constexpr int kSteps = kSlabK / 16;

struct MoeMultiplier {
  MoeShared& smem;
  int num_slabs;
  bool is_gathered;

  // Lets the producer fill a stage again. SAFETY: by every lane, as it has read the weights by
  // ordinary loads; one arrival a warp would do, but compute-sanitizer then reports races.
  __device__ __forceinline__ void release(int stage) const {
    mbarrier_arrive(smem_address(&smem.empty[stage]));
  }

  // Step kStep of slab d; `last`: the stage before, once wgmma may still read its x, else -1.
  template <int kN, int kStep>
  __device__ __forceinline__ void step(MoeDecoder& decoder, int d, int last, bool is_first,
                                       uint64_t b, uint32_t (&a)[kSteps][kMmaTiles][4],
                                       MoeSums& acc) const {
    decoder.load_scales<kStep>(d);
    wgmma_wait<kSteps - 1>();  // the step of the slab before that reads these registers is over
    if (kStep == kSteps - 1 && d == 0 && last >= 0) release(last);
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) decoder.decode<kStep>(j, d, a[kStep][j]);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j)
      wgmma_weights<kN>(reinterpret_cast<float (&)[kN / 2]>(acc[j]), a[kStep][j], b + kStep * 2,
                        !is_first || kStep > 0);
    wgmma_commit();
  }

  // The sums of the first kN tokens; k in ascending steps of 16, whatever kN is.
  template <int kN>
  __device__ __forceinline__ void multiply(int warpgroup, PipelineState<kStages>& state,
                                           MoeSums& acc) const {
    const unsigned x = smem_address(smem.x[0]);
    state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
    MoeDecoder decoder(warpgroup);
    uint32_t a[kSteps][kMmaTiles][4];
    int last = -1;
#pragma unroll 1
    for (int slab = 0; slab < num_slabs; slab += kDepth) {
      mbarrier_wait(smem_address(&smem.full[state.stage]), state.phase);
      if (is_gathered) fence_async_proxy();  // SAFETY: cp.async wrote x, wgmma reads it.
      decoder.begin_stage(smem.w[state.stage]);
#pragma unroll 1
      for (int d = 0; d < kDepth; ++d) {
        if (slab + d >= num_slabs) break;
        const bool is_first = slab + d == 0;
        const uint64_t b = wgmma_descriptor(x + state.stage * kStageX + d * kSlabX);
        decoder.begin_slab(d);
        step<kN, 0>(decoder, d, last, is_first, b, a, acc);
        step<kN, 1>(decoder, d, last, is_first, b, a, acc);
        step<kN, 2>(decoder, d, last, is_first, b, a, acc);
        step<kN, 3>(decoder, d, last, is_first, b, a, acc);
      }
      last = state.stage;
      state.advance();
    }
    wgmma_wait<0>();
    release(last);
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) wgmma_pin(acc[j]);
  }

  // With the smallest of a few instructions that has room for `count` tokens.
  template <int kN = 16>
  __device__ __forceinline__ void few(int count, int warpgroup, PipelineState<kStages>& state,
                                      MoeSums& acc) const {
    if constexpr (kN < kTokens) {
      constexpr int kMore = kN < 64 ? 2 * kN : kN + 32;
      if (count > kN) return few<kMore>(count, warpgroup, state, acc);
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
