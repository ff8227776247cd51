// The producer of gemm_wna16_sm90.cu: one warp that fills the ring of stages.
#pragma once

#include "common/pdl.cuh"
#include "common/pipeline_state.cuh"
#include "gemm_wna16/scheduler_sm90.cuh"

struct Loader {
  Shared& smem;
  const TensorMap *map_x, *map_tail;
  PackedWeight w;
  int slabs, groups, supers;  // of a row of the weight
  RowTiles row_tiles;
  int m, x_part, tail_part;
  int first_k, last_k;  // stages of k

  // Rows of x that are loaded; the stage's other rows keep what they held: their sums are dropped.
  __device__ __forceinline__ int part(const WorkTile& tile) const {
    return tile.token + kTokens <= m ? x_part : tail_part;
  }

  // Copies `bytes` a row tile, `stride` bytes apart in memory.
  __device__ __forceinline__ void copy(unsigned char* to, const unsigned char* from, int row_tile,
                                       int local, int64_t stride, int64_t offset, int bytes,
                                       int to_stride, unsigned full) const {
    bulk_load(smem_address(to) + local * to_stride, from + row_tile * stride + offset, bytes, full);
  }

  // By all lanes: a lane copies one or two arrays of a row tile.
  __device__ __forceinline__ void weight(int stage, int stage_k, const WorkTile& tile) const {
    constexpr int kLanes = kWarpSize / kRowTiles;
    const int lane_idx = threadIdx.x % kWarpSize;
    const unsigned full = smem_address(&smem.full[stage]);
    const int depth = min(kDepth, slabs - stage_k * kDepth);
    const int group = stage_k * kStageK / kGroup;
    const int count = min(kStageGroups, groups - group);
    if (lane_idx == 0)
      mbarrier_arrive_expect_tx(
          full, depth * part(tile) * kSlabRowBytes +
                    kRowTiles * (depth * (kDataBytes + kHighBytes) + count * kScaleTileBytes +
                                 kSuperTileBytes));
    __syncwarp();
    const int local = lane_idx % kRowTiles, row_tile = row_tiles.at(tile.block, local);
    const int64_t slab = stage_k * kDepth;
#pragma unroll
    for (int first = 0; first < 4; first += kLanes) {
      const int plane = first + lane_idx / kRowTiles;
      if (plane == 0)
        copy(smem.data[stage], w.data, row_tile, local, int64_t{slabs} * kDataBytes,
             slab * kDataBytes, depth * kDataBytes, kDepth * kDataBytes, full);
      if (plane == 1)
        copy(smem.scales[stage], w.scales, row_tile, local, int64_t{groups} * kScaleTileBytes,
             int64_t{group} * kScaleTileBytes, count * kScaleTileBytes, kStageGroups * kScaleTileBytes, full);
      if (kHighBytes > 0 && plane == 2)
        copy(smem.high[stage], w.high, row_tile, local, int64_t{slabs} * kHighBytes,
             slab * kHighBytes, depth * kHighBytes, kDepth * kHighBytes, full);
      if (kSuperBlock > 0 && plane == 3)
        copy(smem.super[stage], w.supers, row_tile, local, int64_t{supers} * kSuperTileBytes,
             int64_t{stage_k * kStageK / (kSuperBlock > 0 ? kSuperBlock : 1)} * kSuperTileBytes, kSuperTileBytes, kSuperTileBytes,
             full);
    }
  }

  __device__ __forceinline__ void x(int stage, int stage_k, const WorkTile& tile) const {
    if (!elect_one()) return;
    const unsigned full = smem_address(&smem.full[stage]), to = smem_address(smem.x[stage]);
    const TensorMap* map = tile.token + kTokens <= m ? map_x : map_tail;
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
      if (stage_k * kDepth + d < slabs)
        tma_load_2d(to + d * kSlabX, map, (stage_k * kDepth + d) * kSlabK, tile.token, full);
  }
};

// The first tile's weights are loaded before all else, as far as the ring has room; with `is_early`
// also before the preceding kernel has ended.
__device__ __forceinline__ void produce(Loader& load, const TileScheduler& s, bool is_early) {
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
