// A warp's ring of stages, filled by cp.async.
#pragma once

#include "common/cp_async.cuh"
#include "gemm_wna16/few_rows_block.cuh"

// Loads the stages of a warp in the order it multiplies them. Beyond the end of k it writes zeros:
// codes of 0 with scales of 0.
struct StageLoader {
  const FewRowsParams& p;
  const FewRowsBlock& b;
  const unsigned char *data, *high, *small;  // of the next stage, from this lane on
  int unit, stage, place;
  uint32_t to;
  // Scales and supers take one copy: this lane's chunk of either.
  static constexpr int kScaleChunks = kStageScales / 16;
  static constexpr int kSuperChunks = kStageSupers * kSuperTileBytes / 16;
  static_assert(kScaleChunks + kSuperChunks <= kWarpSize, "a copy each");

  __device__ __forceinline__ StageLoader(const FewRowsParams& p, const FewRowsBlock& b)
      : p(p), b(b), unit(blockIdx.x), place(0), to(smem_address(b.ring) + b.lane_idx * 16) {
    start_unit();
  }

  __device__ __forceinline__ void start_unit() {
    stage = b.stage_begin;
    const int64_t tile = min(b.row_tile(unit, threadIdx.z), b.row_tiles - 1);
    const int64_t first = tile * b.k_tiles + stage * kStageTiles;
    data = p.data + first * kDataBytes + b.lane_idx * 16;
    high = p.high + first * kHighBytes + b.lane_idx * 16;
    const bool is_super = b.lane_idx >= kScaleChunks;
    if (is_super)
      small = p.supers + (tile * p.num_supers + stage * kStageSupers) * kSuperTileBytes +
              (b.lane_idx - kScaleChunks) * 16;
    else
      small =
          p.scales + (tile * p.groups + stage * kStageGroups) * kScaleTileBytes + b.lane_idx * 16;
  }

  __device__ __forceinline__ void copy(uint32_t offset, const unsigned char* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(
                     to + place * kStageBytes + offset),
                 "l"(valid ? from : p.data), "r"(valid ? 16 : 0)
                 : "memory");
  }

  // Always commits a group of copies, an empty one at the end: the wait counts groups.
  __device__ __forceinline__ void load() {
    if (unit < p.num_units && b.stage_begin < b.stage_end) {
      const int tiles = b.k_tiles - stage * kStageTiles;  // that are left
#pragma unroll
      for (int i = 0; i < kStageData / 512; ++i)
        copy(i * 512, data + i * 512, i * 512 / kDataBytes < tiles);
#pragma unroll
      for (int i = 0; i < kStageHigh / 512; ++i)
        copy(kHighAt + i * 512, high + i * 512, (i * 512 + b.lane_idx * 16) / kHighBytes < tiles);
      if (b.lane_idx < kScaleChunks + kSuperChunks) {
        const bool is_super = b.lane_idx >= kScaleChunks;
        const int index = b.lane_idx * 16 / kScaleTileBytes;
        const bool valid =
            is_super ? stage < p.num_supers : stage * kStageGroups + index < p.groups;
        copy(kScalesAt, small, valid);
      }
      data += kStageData, high += kStageHigh;
      small += b.lane_idx >= kScaleChunks ? kStageSupers * kSuperTileBytes : kStageScales;
      if (++stage >= b.stage_end) unit += gridDim.x, start_unit();
    }
    cp_async_commit();
    place = place + 1 >= p.num_stages ? 0 : place + 1;
  }
};
