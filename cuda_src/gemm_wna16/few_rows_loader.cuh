// A warp's ring of stages, filled by cp.async.
#pragma once

#include "common/cp_async.cuh"
#include "gemm_wna16/few_rows_block.cuh"

// Waits until the oldest of the ring's stages has arrived, all of which are in flight or have.
__device__ __forceinline__ void wait_for_oldest(int num_stages) {
  static_assert(kMaxStages == 4, "a case each");
  if (num_stages == 3)
    cp_async_wait<2>();
  else if (num_stages == 2)
    cp_async_wait<1>();
  else if (num_stages == 4)
    cp_async_wait<3>();
  else
    cp_async_wait<0>();
}

// Loads the stages of a warp in the order it multiplies them. Beyond the end of k it writes zeros:
// codes of 0 with scales of 0.
struct StageLoader {
  // Scales and supers take one copy: this lane's chunk of either.
  static constexpr int kScaleChunks = kStageScales / 16;
  static constexpr int kSuperChunks = kStageSupers * kSuperTileBytes / 16;
  static_assert(kScaleChunks + kSuperChunks <= kWarpSize, "a copy each");

  // A tile has whole groups: its index gives theirs.
  static constexpr bool kTilesGroup = kGroup <= kTileColumns;
  static constexpr int kTileScaleBytes = kTileColumns / kGroup * kScaleTileBytes;

  const FewRowsParams& p;
  const FewRowsBlock& b;
  // The next stage: of k, and its first tile, group and super-block in the planes. Indices, and not
  // pointers, for want of registers: of 1024, at least 256 and 4096 numbers each.
  int unit, stage, tile, group, super;
  uint32_t to;  // of this lane

  __device__ __forceinline__ StageLoader(const FewRowsParams& p, const FewRowsBlock& b)
      : p(p), b(b), unit(b.first_unit()), to(smem_address(b.ring) + b.lane_idx * 16) {
    start_unit();
  }

  __device__ __forceinline__ void start_unit() {
    stage = b.stage_begin;
    if (stage >= b.stage_end) unit = p.num_units;
    const int row_tile = min(b.row_tile(unit, threadIdx.z), b.row_tiles - 1);
    tile = row_tile * b.k_tiles + stage * kStageTiles;
    if constexpr (!kTilesGroup) group = row_tile * p.groups + stage * kStageGroups;
    super = row_tile * p.num_supers + stage * kStageSupers;
  }

  template <int kBytes>
  __device__ __forceinline__ const unsigned char* at(const unsigned char* plane, int index) const {
    return plane + static_cast<int64_t>(index) * kBytes + b.lane_idx * 16;
  }
  // This lane's chunk of the scales or of their scales.
  __device__ __forceinline__ const unsigned char* small() const {
    if (kStageSupers == 0 || b.lane_idx < kScaleChunks)
      return kTilesGroup ? at<kTileScaleBytes>(p.scales, tile)
                         : at<kScaleTileBytes>(p.scales, group);
    return at<kSuperTileBytes>(p.supers, super) - kScaleChunks * 16;
  }

  template <int kTo, int kFrom>
  __device__ __forceinline__ void copy(const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %2], [%1 + %3], 16;\n" ::"r"(to),
                 "l"(from), "n"(kTo), "n"(kFrom)
                 : "memory");
  }
  // Copies 16 bytes, or zeros.
  __device__ __forceinline__ void copy_if(bool valid, int offset, const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to + offset),
                 "l"(valid ? from : p.data), "r"(valid ? 16 : 0)
                 : "memory");
  }

  __device__ __forceinline__ void load_whole() {
    const unsigned char* data = at<kDataBytes>(p.data, tile);
    copy<0, 0>(data);
    copy<512, 512>(data);
    copy<1024, 1024>(data);
    copy<1536, 1536>(data);
    if constexpr (kHighBytes > 0) {
      const unsigned char* high = at<kHighBytes>(p.high, tile);
      copy<kHighAt, 0>(high);
      if constexpr (kStageHigh >= 1024) copy<kHighAt + 512, 512>(high);
    }
    if (b.lane_idx < kScaleChunks + kSuperChunks) copy<kScalesAt, 0>(small());
  }

  __device__ __forceinline__ void load_partial() {
    const int tiles = b.k_tiles - stage * kStageTiles;  // that are left
#pragma unroll
    for (int i = 0; i < kStageData / 512; ++i)
      copy_if(i * 512 / kDataBytes < tiles, i * 512, at<kDataBytes>(p.data, tile) + i * 512);
    if constexpr (kHighBytes > 0) {
      constexpr int kTileBytes = kHighBytes > 0 ? kHighBytes : 1;  // no division by zero elsewhere
#pragma unroll
      for (int i = 0; i < kStageHigh / 512; ++i)
        copy_if((i * 512 + b.lane_idx * 16) / kTileBytes < tiles, kHighAt + i * 512,
                at<kHighBytes>(p.high, tile) + i * 512);
    }
    if (b.lane_idx < kScaleChunks + kSuperChunks) {
      const int own = stage * kStageGroups + b.lane_idx * 16 / kScaleTileBytes;
      const bool valid = b.lane_idx < kScaleChunks ? own < p.groups : stage < p.num_supers;
      copy_if(valid, kScalesAt, small());
    }
  }

  // Always commits a group of copies, an empty one at the end: the wait counts groups.
  __device__ __forceinline__ void load() {
    if (unit < p.num_units) {
      if ((stage + 1) * kStageTiles <= b.k_tiles)
        load_whole();
      else
        load_partial();
      tile += kStageTiles, super += kStageSupers;
      if constexpr (!kTilesGroup) group += kStageGroups;
      if (++stage == b.stage_end) unit += b.unit_step(), start_unit();
    }
    cp_async_commit();
    to += kStageBytes;
    const uint32_t end = smem_address(b.ring) + b.lane_idx * 16 + p.num_stages * kStageBytes;
    if (to == end) to -= p.num_stages * kStageBytes;
  }
};
