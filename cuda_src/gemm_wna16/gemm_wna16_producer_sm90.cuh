// The producer of gemm_wna16_sm90.cu: one thread that fills the ring of stages by TMA.
#pragma once

#include "common/pdl.cuh"
#include "common/pipeline_state.cuh"
#include "gemm_wna16/gemm_wna16_scheduler_sm90.cuh"

// Where a box extends past an array's end, TMA writes zeros; they count as loaded bytes.
struct Loader {
  Shared& smem;
  const TensorMap *map_x, *map_tail, *map_data, *map_high, *map_scales, *map_supers;
  int num_gates;  // row tiles of gate, the first half of a block (up is the second); 0: not gated
  int m, x_part, tail_part;
  int first_k, last_k;  // range of stages along k

  // Returns how many rows of x to load. The stage's other rows keep stale data; their sums are
  // dropped.
  __device__ __forceinline__ int part(const WorkTile& tile) const {
    return tile.token + kTokens <= m ? x_part : tail_part;
  }

  // Loads the weight, and announces all bytes of the stage to its mbarrier.
  __device__ __forceinline__ void weight(int stage, int stage_k, const WorkTile& tile) const {
    const unsigned full = smem_address(&smem.full[stage]);
    mbarrier_arrive_expect_tx(full, kDepth * part(tile) * kSlabRowBytes + kStagePlanes);
    if (num_gates == 0) {
      planes<kRowTiles>(stage, stage_k, tile.block * kRowTiles, 0, full);
    } else {
      constexpr int kHalf = kRowTiles / 2;
      planes<kHalf>(stage, stage_k, tile.block * kHalf, 0, full);
      planes<kHalf>(stage, stage_k, num_gates + tile.block * kHalf, kHalf, full);
    }
  }

  __device__ __forceinline__ void x(int stage, int stage_k, const WorkTile& tile) const {
    const unsigned full = smem_address(&smem.full[stage]), to = smem_address(smem.x[stage]);
    const TensorMap* map = tile.token + kTokens <= m ? map_x : map_tail;
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
      tma_load_2d(to + d * kSlabX, map, (stage_k * kDepth + d) * kSlabK, tile.token, full);
  }

 private:
  // Loads kCount row tiles, from `row_tile` on, to the stage, from its row tile `local` on.
  template <int kCount>
  __device__ __forceinline__ void planes(int stage, int stage_k, int row_tile, int local,
                                         unsigned full) const {
    const unsigned to = smem_address(smem.weight[stage]);
    const auto load = [&](const TensorMap* map, int at, int tile_bytes, int y) {
      tma_load_3d(to + at + local * tile_bytes, map, 0, y, row_tile, full);
    };
    load(map_data, 0, kDepth * kDataBytes, stage_k * (kDepth * kDataBytes / kDataBox));
    load(map_scales, kAtScales, kStageGroups * kScaleTileBytes, stage_k * kStageK / kGroup);
    if constexpr (kHighBytes > 0) load(map_high, kAtHigh, kDepth * kHighBytes, stage_k * kDepth);
    if constexpr (kSuperBlock > 0)
      load(map_supers, kAtSuper, kSuperTileBytes, stage_k / kSuperStages);
  }
};

// Loads the first tile's weights first, as far as the ring allows; with `is_early` even before the
// preceding kernel has ended.
__device__ __forceinline__ void produce(const Loader& load, const TileScheduler& s, bool is_early) {
  if (!is_early) pdl_wait();
  int early = 0;
  if (s.first() < s.count()) {
    early = min(kStages, load.last_k - load.first_k);
    const WorkTile tile = s.tile(s.first());
    for (int i = 0; i < early; ++i) load.weight(i, load.first_k + i, tile);
  }
  if (is_early) pdl_wait();
  PipelineState<kStages> state(1);
#pragma unroll 1
  for (int index = s.first(); index < s.count(); index += s.step()) {
    const WorkTile tile = s.tile(index);
#pragma unroll 1
    for (int k = load.first_k; k < load.last_k; ++k) {
      if (early > 0) {
        --early;
      } else {
        mbarrier_wait_to_overwrite(smem_address(&load.smem.empty[state.stage]), state.phase);
        load.weight(state.stage, k, tile);
      }
      load.x(state.stage, k, tile);
      state.advance();
    }
  }
}
