// A stage of a packed weight: consecutive tiles of a row tile, followed by their scales. Each warp
// copies stages to its own ring in shared memory (cp.async) and multiplies from there.
#pragma once

#include "common/cp_async.cuh"
#include "common/reduce.cuh"  // kWarpSize
#include "common/weight_decode.cuh"

constexpr int kStageTiles = kBits == 8 ? 2 : 4;
constexpr int kStageColumns = kStageTiles * kTileColumns;
constexpr int kStageGroups = kStageColumns / kGroup;
constexpr int kStageSupers = kSuperBlock == 0 ? 0 : kStageColumns / kSuperBlock;
static_assert(kStageGroups * kGroup == kStageColumns, "a stage has whole groups");
static_assert(kSuperBlock == 0 || kStageSupers == 1, "a stage is a super-block");
constexpr int kStageData = kStageTiles * kDataBytes;
constexpr int kStageHigh = kStageTiles * kHighBytes;
constexpr int kStageScales = kStageGroups * kScaleTileBytes;
constexpr int kHighAt = kStageData, kScalesAt = kHighAt + kStageHigh;
constexpr int kSupersAt = kScalesAt + kStageScales;
// Whole rows of shared memory's banks: a copy by 32 lanes then writes to four rows, not to five.
constexpr int kStageBytes = (kSupersAt + kStageSupers * kSuperTileBytes + 127) / 128 * 128;
static_assert(kStageData == 2048, "four copies of a warp");

// Copies a warp's stages one after another. Past the end of k it writes zero codes and zero scales.
// Params holds the planes and the number of groups and super-blocks per row, like FewRowsParams.
template <typename Params>
struct StageCopier {
  // One copy per lane covers both planes: each lane copies a 16-byte chunk of scales or of supers.
  static constexpr int kScaleChunks = kStageScales / 16;
  static constexpr int kSuperChunks = kStageSupers * kSuperTileBytes / 16;
  static_assert(kScaleChunks + kSuperChunks <= kWarpSize, "a copy each");

  // Tiles consist of whole groups, so the tile index determines the group index.
  static constexpr bool kTilesGroup = kGroup <= kTileColumns;
  static constexpr int kTileScaleBytes = kTileColumns / kGroup * kScaleTileBytes;

  const Params& p;
  int lane_idx, k_tiles;
  // The next stage along k, and its first tile, group and super-block in the planes. These are
  // indices rather than pointers because registers are scarce; they fit in an int, as a tile holds
  // 1024 weights, a row tile's group at least 256 and its super-block 4096.
  int stage, tile, group, super;
  uint32_t to;  // shared-memory address of this lane's copies

  // Positions the copier at stage `first` of a row tile.
  __device__ __forceinline__ void go_to(int row_tile, int first) {
    stage = first;
    tile = row_tile * k_tiles + stage * kStageTiles;
    if constexpr (!kTilesGroup) group = row_tile * p.groups + stage * kStageGroups;
    super = row_tile * p.num_supers + stage * kStageSupers;
  }

  template <int kBytes>
  __device__ __forceinline__ const unsigned char* at(const unsigned char* plane, int index) const {
    return plane + static_cast<int64_t>(index) * kBytes + lane_idx * 16;
  }
  // Address of this lane's chunk of the scales or super-block factors.
  __device__ __forceinline__ const unsigned char* small() const {
    if (kStageSupers == 0 || lane_idx < kScaleChunks)
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
  // Copies 16 bytes, or writes 16 zero bytes if !valid.
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
    if (lane_idx < kScaleChunks + kSuperChunks) copy<kScalesAt, 0>(small());
  }

  __device__ __forceinline__ void load_partial() {
    const int tiles = k_tiles - stage * kStageTiles;  // tiles left in the row
#pragma unroll
    for (int i = 0; i < kStageData / 512; ++i)
      copy_if(i * 512 / kDataBytes < tiles, i * 512, at<kDataBytes>(p.data, tile) + i * 512);
    if constexpr (kHighBytes > 0) {
      constexpr int kTileBytes = kHighBytes > 0 ? kHighBytes : 1;  // avoids a division by zero
#pragma unroll
      for (int i = 0; i < kStageHigh / 512; ++i)
        copy_if((i * 512 + lane_idx * 16) / kTileBytes < tiles, kHighAt + i * 512,
                at<kHighBytes>(p.high, tile) + i * 512);
    }
    if (lane_idx < kScaleChunks + kSuperChunks) {
      const int own = stage * kStageGroups + lane_idx * 16 / kScaleTileBytes;
      const bool valid = lane_idx < kScaleChunks ? own < p.groups : stage < p.num_supers;
      copy_if(valid, kScalesAt, small());
    }
  }

  // Starts the copies of the next stage and advances to the one after it.
  __device__ __forceinline__ void load_stage() {
    if ((stage + 1) * kStageTiles <= k_tiles)
      load_whole();
    else
      load_partial();
    tile += kStageTiles, super += kStageSupers;
    if constexpr (!kTilesGroup) group += kStageGroups;
    ++stage;
  }
};
