// The products of quantized weights in moe_gemm_sm90.cu: codes become fragments in registers while
// wgmma multiplies those of the steps before with the rows of x in shared memory.
#pragma once

#include "gemm/moe_epilogue_sm90.cuh"
#include "common/wgmma_weights.cuh"

constexpr int kSteps = kSlabK / 16;

// The fragments of a few steps. wgmma reads them while those of the next are decoded: two sets in
// turn. With more registers, or in one set that a loop goes round, ptxas lets wgmma run one at a
// time (C7512).
#ifndef SET_STEPS
#define UNITS 1
#define SET_STEPS 2
#endif
constexpr int kSetSteps = SET_STEPS, kSets = kSteps / kSetSteps;
using MoeFragments = uint32_t[kSetSteps][kMmaTiles][4];

struct MoeMultiplier {
  MoeShared& smem;
  int num_slabs;
  bool is_gathered;

  // Lets the producer fill a stage again. SAFETY: by every lane, as it has read the weights by
  // ordinary loads; one arrival a warp would do, but compute-sanitizer then reports races.
  __device__ __forceinline__ void release(int stage) const {
    mbarrier_arrive(smem_address(&smem.empty[stage]));
  }

  __device__ __forceinline__ void wait(const PipelineState<kStages>& state) const {
    mbarrier_wait(smem_address(&smem.full[state.stage]), state.phase);
    if (is_gathered) fence_async_proxy();  // SAFETY: cp.async wrote x, wgmma reads it.
  }

  template <int kN, int kSet>
  __device__ __forceinline__ void start(uint64_t b, bool is_first, const MoeFragments& a,
                                        MoeSums& acc) const {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSetSteps; ++step)
#pragma unroll
      for (int j = 0; j < kMmaTiles; ++j)
        wgmma_weights<kN>(reinterpret_cast<float (&)[kN / 2]>(acc[j]), a[step][j],
                          b + (kSet * kSetSteps + step) * 2, !is_first || kSet + step > 0);
    wgmma_commit();
  }

  // Multiplies set kSet of a slab, which is in `now`, and decodes the others, two in turn.
  // `held`: a stage that may be filled again once the set before has been multiplied, or -1.
  template <int kN, int kSet = 0>
  __device__ __forceinline__ void multiply_slab(MoeDecoder& decoder, int d, uint64_t b,
                                                bool is_first, int held, MoeFragments& now,
                                                MoeFragments& next, MoeSums& acc) const {
    start<kN, kSet>(b, is_first, now, acc);
    if constexpr (kSet + 1 < kSets) {
      wgmma_wait<1>();  // `next` may be written
      if (kSet == 0 && held >= 0) release(held);
      decoder.decode<(kSet + 1) * kSetSteps>(d, next);
      multiply_slab<kN, kSet + 1>(decoder, d, b, is_first, -1, next, now, acc);
    }
  }

  // The sums of the first kN tokens; k in ascending steps of 16, whatever kN is.
  template <int kN>
  __device__ __forceinline__ void multiply(int warpgroup, PipelineState<kStages>& state,
                                           MoeSums& acc) const {
    static_assert(kSets % 2 == 0, "a slab begins with the same set");
    const unsigned x = smem_address(smem.x[0]);
    state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
    MoeDecoder decoder(warpgroup);
    MoeFragments even, odd;
    int d = 0, held = -1;  // the stage of the slab before, if that ended it
    wait(state);
    decoder.begin_stage(smem.w[state.stage]);
    decoder.begin_slab(0);
    decoder.decode<0>(0, even);
#pragma unroll 1
    for (int slab = 0;;) {
      const uint64_t b = wgmma_descriptor(x + state.stage * kStageX + d * kSlabX);
      multiply_slab<kN>(decoder, d, b, slab == 0, held, even, odd, acc);
      held = -1;
      if (++d == kDepth || slab + 1 == num_slabs) {
        held = state.stage, d = 0;
        state.advance();
      }
      if (++slab == num_slabs) break;
      if (held >= 0) {
        wait(state);
        decoder.begin_stage(smem.w[state.stage]);
      }
      decoder.begin_slab(d);
      wgmma_wait<1>();  // `even` may be written
      decoder.decode<0>(d, even);
    }
    wgmma_wait<0>();
    release(held);
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) wgmma_pin(acc[j]);
  }

#ifdef UNITS
  template <int kN, int kUnit = 0>
  __device__ __forceinline__ void units(MoeDecoder& decoder, int d, uint64_t b, bool is_first,
                                        int held, uint32_t (&a)[2][4], MoeSums& acc) const {
    constexpr int kUnits = kSteps * kMmaTiles, kStep = kUnit / kMmaTiles, kTile = kUnit % kMmaTiles;
    wgmma_fence();
    wgmma_weights<kN>(reinterpret_cast<float (&)[kN / 2]>(acc[kTile]), a[kUnit % 2], b + kStep * 2,
                      !is_first || kStep > 0);
    wgmma_commit();
    wgmma_wait<UNITS>();
    if (kUnit == 0 && held >= 0) release(held);
    if constexpr (kUnit + 1 < kUnits) {
      decoder.decode_one<(kUnit + 1) / kMmaTiles, (kUnit + 1) % kMmaTiles>(d, a[(kUnit + 1) % 2]);
      units<kN, kUnit + 1>(decoder, d, b, is_first, held, a, acc);
    }
  }
  template <int kN>
  __device__ __forceinline__ void multiply_units(int warpgroup, PipelineState<kStages>& state,
                                                 MoeSums& acc) const {
    const unsigned x = smem_address(smem.x[0]);
    state.stage = __shfl_sync(~0u, state.stage, 0);
    MoeDecoder decoder(warpgroup);
    uint32_t a[2][4];
    int d = 0, held = -1;
    wait(state);
    decoder.begin_stage(smem.w[state.stage]);
    decoder.begin_slab(0);
    decoder.decode_one<0, 0>(0, a[0]);
#pragma unroll 1
    for (int slab = 0;;) {
      const uint64_t b = wgmma_descriptor(x + state.stage * kStageX + d * kSlabX);
      units<kN>(decoder, d, b, slab == 0, held, a, acc);
      held = -1;
      if (++d == kDepth || slab + 1 == num_slabs) {
        held = state.stage, d = 0;
        state.advance();
      }
      if (++slab == num_slabs) break;
      if (held >= 0) {
        wait(state);
        decoder.begin_stage(smem.w[state.stage]);
      }
      decoder.begin_slab(d);
      decoder.decode_one<0, 0>(d, a[0]);
    }
    wgmma_wait<0>();
    release(held);
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) wgmma_pin(acc[j]);
  }
#endif

  // With the smallest of a few instructions that has room for `count` tokens.
  template <int kN = 16>
  __device__ __forceinline__ void few(int count, int warpgroup, PipelineState<kStages>& state,
                                      MoeSums& acc) const {
    if constexpr (kN < kTokens) {
      constexpr int kMore = kN < 64 ? kN + 16 : kN + 32;
      if (count > kN) return few<kMore>(count, warpgroup, state, acc);
    }
#ifdef UNITS
    multiply_units<kN>(warpgroup, state, acc);
#else
    multiply<kN>(warpgroup, state, acc);
#endif
  }
};

// As in moe_multiply_sm90.cuh.
__device__ __forceinline__ void multiply_few(int count, MoeShared& smem, int warpgroup,
                                             int num_slabs, bool is_gathered,
                                             PipelineState<kStages>& state, MoeSums& acc) {
  MoeMultiplier{smem, num_slabs, is_gathered}.few(count, warpgroup, state, acc);
}
