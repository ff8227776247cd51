// Products of quantized weights in moe_gemm_sm90.cu: codes are decoded to fragments in registers
// while wgmma multiplies the preceding fragments by the rows of x in shared memory.
#pragma once

#include "moe_gemm/moe_epilogue_sm90.cuh"
#include "common/wgmma_weights.cuh"

constexpr int kSteps = kSlabK / 16;

// The products of a slab, ordered by step, then by m-tile, are processed in sets: a set's fragments
// are decoded while wgmma reads the previous set's. A set costs about 60 clocks on top of its
// products. With more registers ptxas would make each wgmma wait for the previous one (C7512).
constexpr int kSetProducts = kMixesRows                        ? 2
                             : kTokens > 96                    ? 1
                             : kTokens > 64 || kWarpgroups > 2 ? 2
                                                               : 4;
constexpr int kSets = kSteps * kMmaTiles / kSetProducts;
static_assert(kSets % 2 == 0, "a slab begins with the same registers");
using MoeFragments = uint32_t[kSetProducts][4];

struct MoeMultiplier {
  MoeShared& smem;
  int num_slabs;
  bool is_gathered, is_gated;

  // Lets the producer refill a stage. SAFETY: every lane arrives, because it has read the weights
  // by ordinary loads; one arrival per warp would suffice, but compute-sanitizer then reports
  // races.
  __device__ __forceinline__ void release(int stage) const {
    mbarrier_arrive(smem_address(&smem.empty[stage]));
  }

  __device__ __forceinline__ void wait(const PipelineState<kStages>& state) const {
    mbarrier_wait(smem_address(&smem.full[state.stage]), state.phase);
    if (is_gathered) fence_async_proxy();  // SAFETY: cp.async wrote x, wgmma reads it.
  }

  // Multiplies set kSet of slab d, whose fragments are in `now`, and all later sets. `pending`:
  // stage to release once the previous slab has been multiplied, or -1.
  template <int kN, int kSet = 0>
  __device__ __forceinline__ void multiply_slab(MoeDecoder& decoder, int d, uint64_t b,
                                                bool is_first, int pending, MoeFragments& now,
                                                MoeFragments& next, MoeSums& acc) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSetProducts; ++i) {
      const int step = (kSet * kSetProducts + i) / kMmaTiles;
      const int tile = (kSet * kSetProducts + i) % kMmaTiles;
      wgmma_weights<kN>(reinterpret_cast<float (&)[kN / 2]>(acc[tile]), now[i], b + step * 2,
                        !is_first || step > 0);
    }
    wgmma_commit();
    if constexpr (kSet + 1 < kSets) {
      wgmma_wait<1>();  // `next` may be overwritten
      if (kSet == 0 && pending >= 0) release(pending);
      decoder.decode<(kSet + 1) * kSetProducts>(d, next);
      multiply_slab<kN, kSet + 1>(decoder, d, b, is_first, pending, next, now, acc);
    }
  }

  // Computes the first kN tokens' sums, in ascending steps of 16 along k for every kN.
  template <int kN>
  __device__ __forceinline__ void multiply(int warpgroup, PipelineState<kStages>& state,
                                           MoeSums& acc) const {
    const unsigned x = smem_address(smem.x[0]);
    state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
    MoeDecoder decoder(warpgroup, is_gated);
    MoeFragments even, odd;
    int d = 0, pending = -1;  // stage to release once its last slab is multiplied; or -1
    wait(state);
    decoder.begin_stage(smem.w[state.stage]);
    decoder.begin_slab(0);
    decoder.decode<0>(0, even);
#pragma unroll 1
    for (int slab = 0;;) {
      const uint64_t b = wgmma_descriptor(x + state.stage * kStageX + d * kSlabX);
      multiply_slab<kN>(decoder, d, b, slab == 0, pending, even, odd, acc);
      pending = -1;
      if (++d == kDepth || slab + 1 == num_slabs) {
        pending = state.stage, d = 0;
        state.advance();
      }
      if (++slab == num_slabs) break;
      if (pending >= 0) {
        wait(state);
        decoder.begin_stage(smem.w[state.stage]);
      }
      decoder.begin_slab(d);
      wgmma_wait<1>();  // `even` may be overwritten
      decoder.decode<0>(d, even);
    }
    wgmma_wait<0>();
    release(pending);
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) {
      wgmma_pin(acc[j]);
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) acc[j][i] *= MoeDecoder::kDivisor;
    }
  }

  // Picks the smallest of a few instruction widths that covers `count` tokens. (With a sixth one
  // for kMixesRows, ptxas would make each wgmma wait for the previous one.)
  template <int kN = kMixesRows ? 160 : 16>
  __device__ __forceinline__ void few(int count, int warpgroup, PipelineState<kStages>& state,
                                      MoeSums& acc) const {
    if constexpr (kN < kTokens) {
      constexpr bool kIsNear = kN < 64 || kN == 192 || kN == 208;
      constexpr int kMore = kIsNear ? kN + 16 : kN + 32;
      if (count > kN) return few<kMore>(count, warpgroup, state, acc);
    }
    multiply<kN>(warpgroup, state, acc);
  }
};

// See moe_multiply_sm90.cuh.
__device__ __forceinline__ void multiply_few(int count, MoeShared& smem, int warpgroup,
                                             int num_slabs, const MoeEpilogue& e,
                                             PipelineState<kStages>& state, MoeSums& acc) {
  MoeMultiplier{smem, num_slabs, !e.scatters, e.is_gated()}.few(count, warpgroup, state, acc);
}
