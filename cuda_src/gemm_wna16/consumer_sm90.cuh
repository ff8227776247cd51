// The consumers of gemm_wna16_sm90.cu: weights become fragments in registers, wgmma multiplies them
// with the rows of x in shared memory, and the epilogue writes the sums.
//
// The weight is wgmma's A and the tokens are its B: sums are (rows of the weight, tokens).
#pragma once

#include "common/pipeline_state.cuh"
#include "gemm_wna16/epilogue_sm90.cuh"
#include "gemm_wna16/weights_sm90.cuh"
#include "gemm_wna16/wgmma_weights_sm90.cuh"

using Sums = float[kMmaTiles][kTokens / 2];
// The fragments of a slab. wgmma reads them while the next slab's are decoded, a step behind.
using Fragments = uint32_t[kSteps][kMmaTiles][4];

struct Consumer {
  Shared& smem;
  int slabs;            // of k
  int first_k, last_k;  // stages of k
  int warpgroup, warp_idx, lane_idx;

  __device__ __forceinline__ int row_tile(int mma) const {
    return (warpgroup * kMmaTiles + mma) * 4 + warp_idx % 4;
  }

  // SAFETY: every warp releases a stage, as it has read the weights by ordinary loads.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (lane_idx == 0) mbarrier_arrive(smem_address(&smem.empty[stage]));
  }

  __device__ __forceinline__ void load_scales(int stage, int d, int step, int mma,
                                              RowScales& scales) const {
    const int group = kGroup < kStageK ? (d * kSlabK + step * 16) / kGroup : 0;
    const int tile = row_tile(mma), g = lane_idx / 4;
    const int place = (tile * kStageGroups + group) * kScaleTileBytes + g * kScaleBytes;
    scales.set(load_small<kScaleBytes>(smem.scales[stage] + place),
               load_small<kSuperBytes>(smem.super[stage] + tile * kSuperTileBytes +
                                       g * kSuperBytes));
  }

  template <int kStep>
  __device__ __forceinline__ void step(int stage, int d, int previous, bool is_first,
                                       uint64_t b, const TileWords (&words)[kMmaTiles],
                                       RowScales (&scales)[kMmaTiles], Fragments& a,
                                       Sums& acc) const {
    if (kStep * 16 % kGroup == 0)
#pragma unroll
      for (int j = 0; j < kMmaTiles; ++j) load_scales(stage, d, kStep, j, scales[j]);
    wgmma_wait<kSteps - 1>();  // the step of the slab before that reads these registers is over
    if (kStep == kSteps - 1 && d == 0 && previous >= 0) release(previous);
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) decode_weights<kStep>(words[j], scales[j], a[kStep][j]);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j)
      wgmma_weights<kTokens>(acc[j], a[kStep][j], b + kStep * 2, !is_first || kStep > 0);
    wgmma_commit();
  }

  // Sums this CTA's share of k.
  __device__ __forceinline__ void multiply(PipelineState<kStages>& state, Sums& acc) const {
    const unsigned x = smem_address(smem.x[0]);
    state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
    Fragments a;
    RowScales scales[kMmaTiles];
    int previous = -1;
#pragma unroll 1
    for (int k = first_k; k < last_k; ++k) {
      const int stage = state.stage;
      mbarrier_wait(smem_address(&smem.full[stage]), state.phase);
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const int slab = k * kDepth + d;
        if (d > 0 && slab >= slabs) break;
        const bool is_first = k == first_k && d == 0;
        TileWords words[kMmaTiles];
#pragma unroll
        for (int j = 0; j < kMmaTiles; ++j)
          words[j].load(smem.data[stage] + (row_tile(j) * kDepth + d) * kDataBytes,
                        smem.high[stage] + (row_tile(j) * kDepth + d) * kHighBytes, lane_idx);
        const uint64_t b = wgmma_descriptor(x + stage * kStageX + d * kSlabX);
        step<0>(stage, d, previous, is_first, b, words, scales, a, acc);
        step<1>(stage, d, previous, is_first, b, words, scales, a, acc);
        step<2>(stage, d, previous, is_first, b, words, scales, a, acc);
        step<3>(stage, d, previous, is_first, b, words, scales, a, acc);
      }
      previous = stage;
      state.advance();
    }
    wgmma_wait<0>();
    if (previous >= 0) release(previous);
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) wgmma_pin(acc[j]);
  }

  // Adds the sums of the cluster's CTAs for this CTA's slice, in their order. False: it has none.
  __device__ __forceinline__ bool exchange(const Sums& acc, float (&own)[kSliceSums]) const {
    const int me = cluster_rank();
    const auto at = [&](int from, int to, int vec) {
      const int place = from - (from > to);
      return (place * kSliceVecs + vec) * kConsumerThreads + static_cast<int>(threadIdx.x);
    };
#pragma unroll
    for (int to = 0; to < kFinishers; ++to) {
#pragma unroll
      for (int i = 0; i < kSliceVecs; ++i) {
        const int first = to * kSliceVecs, eights = kSliceTokens / 8;
        const float* a = acc[first % kMmaTiles + i / eights] + (first / kMmaTiles + i % eights) * 4;
        if (to == me) {
#pragma unroll
          for (int c = 0; c < 4; ++c) own[i * 4 + c] = a[c];
        } else {
          cluster_send(smem_address(smem.sums) + at(me, to, i) * 16, smem_address(&smem.sums_full),
                       to, a[0], a[1], a[2], a[3]);
        }
      }
    }
    if (me >= kFinishers) return false;
    mbarrier_wait_cluster(smem_address(&smem.sums_full), 0);
#pragma unroll
    for (int i = 0; i < kSliceVecs; ++i) {
      float sum[4] = {};
#pragma unroll
      for (int from = 0; from < kSplits; ++from) {
        Vec<float, 4> part = {own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]};
        if (from != me) part = load_vec<float, 4>(smem.sums + at(from, me, i) * 4);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += part.v[c];
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) own[4 * i + c] = sum[c];
    }
    return true;
  }

  // Writes slice `slice` of a tile: through staging, where sums become rows.
  __device__ __forceinline__ void store(const RowEpilogue& e, const float* sums,
                                        const WorkTile& tile, int num_tokens, int slice) const {
    const int g = lane_idx / 4, t = lane_idx % 4;
    const int mma = slice * kSliceVecs % kMmaTiles;
    const int token = tile.token + slice * kSliceVecs / kMmaTiles * 8;
#pragma unroll
    for (int first = 0; first < kSliceTokens; first += kChunk) {
      if (token + first >= num_tokens) break;
#pragma unroll
      for (int j = 0; j < kSliceMmaTiles; ++j) {
        const int row = ((warpgroup * kSliceMmaTiles + j) * 4 + warp_idx % 4) * kTileRows + g;
#pragma unroll
        for (int i = 0; i < kChunk / 8; ++i) {
          const float* v = sums + j * kSliceTokens / 2 + first / 2 + 4 * i;
#pragma unroll
          for (int c = 0; c < 4; ++c)
            smem.staging[(i * 8 + 2 * t + c % 2) * kStagingRow + row + c / 2 * 8] = v[c];
        }
      }
      named_barrier_sync<kConsumerThreads>(1);
      finish_staged(e, smem.staging, token + first, min(kChunk, num_tokens - token - first),
                    tile.block, mma);
      named_barrier_sync<kConsumerThreads>(1);  // SAFETY: the next sums overwrite staging.
    }
  }
};

__device__ __forceinline__ void consume(const Consumer& c, const RowEpilogue& e,
                                        const TileScheduler& s, int m) {
  pdl_wait();  // the preceding kernel may read what we write, and write what we read
  PipelineState<kStages> state(0);
#pragma unroll 1
  for (int index = s.first(); index < s.count(); index += s.step()) {
    const WorkTile tile = s.tile(index);
    Sums acc;
    c.multiply(state, acc);
    if constexpr (kSplits > 1) {
      float own[kSliceSums];
      if (c.exchange(acc, own)) c.store(e, own, tile, m, cluster_rank());
    } else {
      c.store(e, acc[0], tile, m, 0);
    }
  }
}
