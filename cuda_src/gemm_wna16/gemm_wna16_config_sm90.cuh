// The work tile that a module of gemm_wna16_sm90.cu is compiled for, given by -D
// (HopperConfig in engine/kernels/gemm_wna16/sm90.py), and the constants derived from it.
#pragma once

#include "common/reduce.cuh"  // kWarpSize
#include "common/sm90.cuh"
#include "common/weight_format.cuh"

constexpr int kSlabK = kTileColumns;  // 64 values of k: 128 bytes of a row of x, the widest swizzle
constexpr int kSteps = kSlabK / 16;
constexpr int kSlabRowBytes = 128;

constexpr int kTokens = TOKENS;          // rows of x
constexpr int kWarpgroups = WARPGROUPS;  // consumer warpgroups
constexpr int kMmaTiles = MMA_TILES;     // m-tiles (64 rows of the weight) per warpgroup
constexpr int kDepth = DEPTH;            // slabs in a stage
constexpr int kStages = STAGES;
constexpr int kSplits = SPLITS;  // CTAs of a cluster that share a sum over k
constexpr int kBlocks = BLOCKS;  // CTAs per multiprocessor
// Codes are multiplied unscaled, and the sums over a group by its scale: fewer instructions for few
// tokens. Otherwise weights rounded to scalar_t are multiplied.
constexpr bool kScalesSums = SCALES_SUMS;
constexpr int kMmaM = 64;
constexpr int kRows = kWarpgroups * kMmaTiles * kMmaM, kRowTiles = kRows / kTileRows;
constexpr int kStageK = kDepth * kSlabK;
constexpr int kSuperStages = kSuperBlock > 0 ? kSuperBlock / kStageK : 1;  // stages per super-block
constexpr int kStageGroups = kStageK > kGroup ? kStageK / kGroup : 1;
static_assert(kStageK % kGroup == 0 || kGroup % kStageK == 0, "a stage has whole groups or a part");
static_assert(kSuperBlock == 0 || kSuperBlock % kStageK == 0, "a stage lies in one super-block");
static_assert(!kScalesSums || (kGroup >= kSlabK && !kHasMinimum), "whole slabs, and no minimums");

constexpr int kConsumerThreads = kWarpgroups * 128;
// One producer warp, or a whole warpgroup if registers move: setmaxnreg acts on warpgroups.
constexpr bool kMovesRegisters = kWarpgroups == 2 && kMmaTiles * kTokens >= 128;
constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : kWarpSize);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Bytes of a stage: of x, and of the weight's planes, which TMA writes from multiples of 128 on.
constexpr int kSlabX = kTokens * kSlabRowBytes, kStageX = kDepth * kSlabX;
constexpr int kStageData = kRowTiles * kDepth * kDataBytes;
constexpr int kStageHigh = kRowTiles * kDepth * kHighBytes;
constexpr int kStageScales = kRowTiles * kStageGroups * kScaleTileBytes;
constexpr int kStageSuper = kRowTiles * kSuperTileBytes;
constexpr int kStagePlanes = kStageData + kStageHigh + kStageScales + kStageSuper;
constexpr int kAtHigh = kStageData, kAtScales = kAtHigh + (kStageHigh + 127) / 128 * 128;
constexpr int kAtSuper = kAtScales + (kStageScales + 127) / 128 * 128;
constexpr int kStageWeight = kAtSuper + (kStageSuper + 127) / 128 * 128;

static_assert(kRowTiles % 8 == 0, "half of the row tiles have whole 128 bytes of scales");
constexpr int kDataBox = 256;  // bytes of a row of map_data

// A slice of a tile's sums, finished by one CTA of the cluster: some tokens, or one m-tile of each
// warpgroup for eight tokens. A thread holds it as vectors of four sums. The number of slices is a
// power of two, so that they are equal; with more CTAs than slices the last ones finish nothing.
constexpr int kVecs = kMmaTiles * kTokens / 8;
__host__ __device__ constexpr int floor_power_of_two(int n) {
  return n < 2 ? 1 : 2 * floor_power_of_two(n / 2);
}
constexpr int kFinishers = floor_power_of_two(kSplits < kVecs ? kSplits : kVecs);
static_assert(kVecs % kFinishers == 0, "equal slices");
constexpr int kSliceVecs = kVecs / kFinishers, kSliceSums = kSliceVecs * 4;
constexpr int kSliceMmaTiles = kSliceVecs < kMmaTiles ? kSliceVecs : kMmaTiles;
constexpr int kSliceTokens = kSliceVecs / kSliceMmaTiles * 8;
constexpr int kSliceRows = kWarpgroups * kSliceMmaTiles * kMmaM;

// Staging of results: one row per token. The padding puts the lanes of a warp in different banks.
constexpr int kChunk = kSliceTokens < CHUNK ? kSliceTokens : CHUNK;
constexpr int kStagingRow = kSliceRows + 4;

// Large tiles have a second store path, for 16-bit results without residual: each warpgroup stages
// 64 tokens by 64 rows. Two m-tiles are excluded, as the path does not handle gate and up in pairs
// of m-tiles.
constexpr bool kStoresHalves =
    kSplits == 1 && kMmaTiles == 1 && kTokens % 64 == 0 && kTokens >= 128;
// In a gated product, a warp with two m-tiles holds rows of gate in the first and the same rows of
// up in the second. Otherwise each m-tile holds 8 rows of gate, as a warp's rows g, and 8 of up, as
// rows g + 8.
constexpr bool kPairsTiles = kMmaTiles == 2 && kSplits == 1;
constexpr int kHalvesTokens = 64, kHalvesBytes = kHalvesTokens * kMmaM * 2;
static_assert(!kStoresHalves || kWarpgroups * kHalvesBytes <= kChunk * kStagingRow * 4, "staging");

// Dynamic shared memory, from an address aligned to the swizzle's atoms.
struct Shared {
  unsigned char x[kStages][kStageX];
  unsigned char weight[kStages][kStageWeight];
  alignas(128) float staging[kChunk * kStagingRow];
  // Sums from the cluster's other CTAs.
  float sums[kSplits > 1 ? (kSplits - 1) * kSliceSums * kConsumerThreads : 4];
  uint64_t full[kStages], empty[kStages], sums_full;
};
static_assert(kThreads == THREADS && sizeof(Shared) + 1024 <= SHARED_BYTES,
              "HopperConfig in gemm_wna16/sm90.py computes other sizes");
