// The consumer warpgroups of gemm_sm90.cu: wgmma on the stages of the ring, then the epilogue.
#pragma once

#include "common/wgmma.cuh"
#include "gemm/gemm_cluster_sum_sm90.cuh"
#include "gemm/gemm_sender_sm90.cuh"
#include "gemm/gemm_swapped_sm90.cuh"

using Sums = float[kMmaTilesM][kWarpgroupCols / 2];

// Releases a stage: arrives on the empty mbarrier of each CTA that loads into it.
__device__ __forceinline__ void consumer_release(const Pipeline& p, const TileScheduler& s,
                                                 int stage) {
  const int thread = threadIdx.x % 128;
  const unsigned empty = p.empty + stage * 8;
  if constexpr (kClusterM * kClusterN == 1) {
    if (thread == 0) mbarrier_arrive(empty);
  } else if (thread < kClusterM + kClusterN - 1) {
    const int layer = s.rank_k * kClusterM * kClusterN;
    int i = s.rank_m, j = thread;  // this row's CTAs first, then the rest of the column
    if (thread >= kClusterN) {
      i = thread - kClusterN + (thread - kClusterN >= s.rank_m);
      j = s.rank_n;
    }
    mbarrier_arrive_cluster(empty, layer + j * kClusterM + i);
  }
}

// Adds the sums of a part of k to the total, once its products are done.
__device__ __forceinline__ void add_part(Sums& part, Sums& total) {
  wgmma_wait<0>();
#pragma unroll
  for (int j = 0; j < kMmaTilesM; ++j) {
    wgmma_pin(part[j]);
#pragma unroll
    for (int i = 0; i < kWarpgroupCols / 2; ++i) total[j][i] += part[j][i];
  }
}

// Accumulates this CTA's share of k in `acc`; with kSumsInParts, parts of `part` stages one after
// another, each from zero. A warm-up pass runs the same instructions once on uninitialised shared
// memory; it neither waits nor releases.
__device__ __forceinline__ void multiply(const Pipeline& p, const TileScheduler& s, int warpgroup,
                                         int part, bool is_warmup, DynamicPipelineState& state,
                                         Sums& acc) {
  // Offset of the warpgroup's m-tiles, which are rows of x, or of the weight in swapped tiles.
  const unsigned m_tiles = warpgroup * kMmaTilesM * kMmaM * kSlabRowBytes;
  const unsigned x = p.x + (kSharesColumns || kIsSwapped ? 0 : m_tiles);
  unsigned w = p.w;
  if (kSharesColumns) w += warpgroup * kWarpgroupCols * kSlabRowBytes;
  if (kIsSwapped && !kSplitsSlabs) w += m_tiles;
  const unsigned full = is_warmup ? p.idle : p.full;
  const int last_k = is_warmup ? s.first_k + 1 : s.last_k;
  if (is_warmup) state.phase = 1;  // no wait: the phase before the first counts as completed
  state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
  int last = 0;
  // Sums stages [begin, end); the first product overwrites `sums`.
  const auto sum_stages = [&](int begin, int end, Sums& sums) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      mbarrier_wait(full + state.stage * 8, state.phase);
      wgmma_fence();
#pragma unroll
      for (int slab = 0; slab < kDepth / kSlabStep; ++slab) {
        const int d = slab * kSlabStep + (kSplitsSlabs ? warpgroup : 0);
        const uint64_t of_x = wgmma_descriptor(x + state.stage * p.stage_x + d * p.slab_x);
        const uint64_t of_w = wgmma_descriptor(w + state.stage * kStageW + d * kBytesW);
        const uint64_t a = kIsSwapped ? of_w : of_x, b = kIsSwapped ? of_x : of_w;
#pragma unroll
        for (int step = 0; step < kSlabK / 16; ++step)
#pragma unroll
          for (int j = 0; j < kMmaTilesM; ++j)
            wgmma<kWarpgroupCols>(sums[j], a + j * (kMmaM * kSlabRowBytes / 16) + step * 2,
                                  b + step * 2, i > begin || slab > 0 || step > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the previous stage has been read
      if (i > s.first_k) consumer_release(p, s, last);
      last = state.stage;
      state.advance(p.stages);
    }
  };
  if constexpr (kSumsInParts) {
#pragma unroll
    for (int j = 0; j < kMmaTilesM; ++j)
#pragma unroll
      for (int i = 0; i < kWarpgroupCols / 2; ++i) acc[j][i] = 0.0f;
#pragma unroll 1
    for (int begin = s.first_k; begin < last_k; begin += part) {
      Sums sums;
      sum_stages(begin, min(begin + part, last_k), sums);
      add_part(sums, acc);
    }
  } else {
    sum_stages(s.first_k, last_k, acc);
    wgmma_wait<0>();
  }
  if (is_warmup)
    state = DynamicPipelineState(0);
  else
    consumer_release(p, s, last);
#pragma unroll
  for (int j = 0; j < kMmaTilesM; ++j) wgmma_pin(acc[j]);
}

// The consumers' loop. With `warms_up` it first computes a tile below the last row, storing
// nothing, while the preceding kernel still runs (with kClusterK > 1 it only multiplies): the
// instructions are cached by the time x arrives.
__device__ __forceinline__ void consume(const Pipeline& p, const TileScheduler& s,
                                        unsigned char* smem, const Epilogue& e, bool is_wide,
                                        const TensorMap* map_out, bool warms_up, int sent_rows,
                                        int part) {
  // The shuffle tells ptxas that it is warp-uniform: descriptors are then computed once per warp.
  const int warp_idx = __shfl_sync(~0u, (threadIdx.x - kFirstConsumer) / 32, 0);
  const int warpgroup = warp_idx / 4;
  unsigned char* staging = smem + (p.staging - p.x) + warp_idx * kStagings * kWarpStaging;
  constexpr int kWarmup = -1;
  const auto next = [&](int index) {
    if (index != kWarmup) return index + s.step();
    pdl_wait();  // the preceding kernel may read our outputs and write our inputs
    return s.first();
  };
  DynamicPipelineState state(0);
#pragma unroll 1
  for (int index = warms_up ? kWarmup : next(kWarmup); index < s.count(); index = next(index)) {
    Sums acc;
    multiply(p, s, warpgroup, part, index == kWarmup, state, acc);
    const int2 tile = index == kWarmup ? make_int2(s.m, 0) : s.tile(index);
    if constexpr (kIsSwapped) {
      store_swapped(e, acc[0], smem + (p.staging - p.x), tile, warpgroup, s.m, s.n);
    } else if constexpr (kClusterK > 1) {
      float own[kSliceSums];
      const int row = warpgroup * kMmaM + warp_idx % 4 * 16;
      if (tile.x + row >= s.m) continue;  // no CTA sends or awaits these nonexistent rows
      exchange_sums(p, s, smem + (p.sums - p.x), acc[0], own);
      const Corner corner{staging, tile.x + row, tile.y + s.rank_k * kSlice};
      store(e, own, corner, s.m, s.n, is_wide, map_out, 0);
    } else {
#pragma unroll
      for (int i = 0; i < kMmaTilesM; ++i) {
        const int m_tile = kSharesColumns ? i : warpgroup * kMmaTilesM + i;
        const int row = tile.x + m_tile * kMmaM + warp_idx % 4 * 16;
        const int col = tile.y + (kSharesColumns ? warpgroup * kWarpgroupCols : 0);
        store(e, acc[i], Corner{staging, row, col}, s.m, s.n, is_wide, map_out, i);
      }
    }
    if constexpr (kSends) {
      if (tile.x < sent_rows) count_stored(p.stored);
    }
  }
  if constexpr (kStores) bulk_wait();  // shared memory must outlive the stores in flight
}
