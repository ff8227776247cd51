// Work tile of a module of gemm_wna16_sm90.cu, set by -D (HopperConfig in
// engine/kernels/gemm_wna16/sm90.py), and the constants derived from it.
#pragma once

#include "common/reduce.cuh"  // kWarpSize
#include "common/sm90.cuh"
#include "common/weight_format.cuh"

constexpr int kSlabK = kTileColumns;  // 64 values of k: 128 bytes of a row of x, the widest swizzle
constexpr int kSteps = kSlabK / 16;
constexpr int kSlabRowBytes = 128;

constexpr int kTokens = TOKENS;          // rows of x per tile
constexpr int kWarpgroups = WARPGROUPS;  // consumer warpgroups
constexpr int kMmaTiles = MMA_TILES;     // m-tiles (64 rows of the weight) per warpgroup
constexpr int kDepth = DEPTH;            // slabs per stage
constexpr int kStages = STAGES;
constexpr int kSplits = SPLITS;  // CTAs of a cluster that split a sum over k
constexpr int kBlocks = BLOCKS;  // CTAs per multiprocessor
// True: codes are multiplied unscaled, and each group's sums by its scale, which takes fewer
// instructions for few tokens. False: weights are rounded to scalar_t before the product.
constexpr bool kScalesSums = SCALES_SUMS;
// Parts of k that a CTA sums one after another, each from zero, adding the sums in this order. A
// cluster of as many CTAs (SPLITS) adds the same numbers in the same order: the bits are equal.
#ifdef PARTS
constexpr int kParts = PARTS;
#else
constexpr int kParts = 1;
#endif
constexpr int kPartSlabs = 2;  // slabs: every part but the last is a multiple of them
static_assert(kParts == 1 || (kSplits == 1 && !kScalesSums), "one CTA sums all of k");
constexpr int kMmaM = 64;
constexpr int kRows = kWarpgroups * kMmaTiles * kMmaM, kRowTiles = kRows / kTileRows;
constexpr int kStageK = kDepth * kSlabK;
constexpr int kSuperStages = kSuperBlock > 0 ? kSuperBlock / kStageK : 1;  // stages per super-block
constexpr int kStageGroups = kStageK > kGroup ? kStageK / kGroup : 1;
static_assert(kStageK % kGroup == 0 || kGroup % kStageK == 0, "a stage has whole groups or a part");
static_assert(kSuperBlock == 0 || kSuperBlock % kStageK == 0, "a stage lies in one super-block");
static_assert(!kScalesSums || (kGroup >= kSlabK && !kHasMinimum), "whole slabs, and no minimums");
constexpr int kGroupSlabs = kGroup > kSlabK ? kGroup / kSlabK : 1;
static_assert(!kScalesSums || kStageK % kGroup == 0, "a stage has whole groups");
static_assert(kParts == 1 || kPartSlabs % kDepth == 0, "a part has whole stages");

constexpr int kConsumerThreads = kWarpgroups * 128;
// The producer is one warp, or a whole warpgroup if registers move: setmaxnreg acts on warpgroups.
constexpr bool kMovesRegisters = kWarpgroups == 2 && kMmaTiles * kTokens >= 128;
constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : kWarpSize);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Bytes per stage of x and of the weight's planes, which TMA writes at multiples of 128.
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
constexpr int kDataBox = 256;  // bytes per row of map_data

// A slice of a tile's sums is finished by one CTA of the cluster: some tokens, or with eight tokens
// one m-tile of each warpgroup. A thread holds its slice as vectors of four sums. The number of
// slices is a power of two, so that they are equal; any CTAs beyond that number finish nothing.
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
static_assert(kSliceVecs % kSliceMmaTiles == 0, "a slice has as many tokens of each m-tile");

// Staging of results: one row per token, padded so that the lanes of a warp use different banks.
constexpr int kChunk = CHUNK;
constexpr int kStagingRow = kSliceRows + 4;
static_assert(kSliceTokens % kChunk == 0, "a slice is staged in whole chunks");

// Large tiles have a second store path, for 16-bit results without residual: each warpgroup stages
// 64 tokens by 64 rows. In a gated product of such a tile, each row tile holds 8 rows of gate (the
// warp's rows g) and 8 of up (rows g + 8); in all other tiles the first half of the rows is gate.
constexpr bool kStoresHalves =
    kSplits == 1 && kMmaTiles == 1 && kTokens % 64 == 0 && kTokens >= 128;
constexpr int kHalvesTokens = 64, kHalvesBytes = kHalvesTokens * kMmaM * 2;
static_assert(!kStoresHalves || kWarpgroups * kHalvesBytes <= kChunk * kStagingRow * 4, "staging");

// Dynamic shared memory, aligned to the swizzle's atoms.
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
