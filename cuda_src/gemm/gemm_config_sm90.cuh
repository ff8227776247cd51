// Work tile of a module of gemm_sm90.cu, gemm_fp8_sm90.cu or gemm_int8_sm90.cu, set by -D
// (HopperConfig in engine/kernels/gemm/sm90.py), and the constants derived from it: warpgroup
// roles, registers, shared memory.
#pragma once

#include "common/sm90.cuh"

constexpr int kTileM = TILE_M, kTileN = TILE_N;
constexpr int kClusterM = CLUSTER_M, kClusterN = CLUSTER_N, kClusterK = CLUSTER_K;
constexpr int kMmaM = 64;           // rows of an m-tile: one wgmma
constexpr int kSlabRowBytes = 128;  // the widest swizzle
#ifdef CODES
constexpr int kCodes = CODES;  // format of the 8-bit operands: 1 e4m3, 2 int8
#else
constexpr int kCodes = 0;  // operands are scalar_t
#endif
constexpr int kSlabK = kCodes == 0 ? 64 : 128;  // values of k per slab
constexpr int kDepth = DEPTH;                   // slabs per stage
constexpr int kStages = STAGES;   // stages of the ring; the launch sets them for up to 64 rows
constexpr bool kStores = STORES;  // TMA stores results while the next tile is multiplied
#ifdef SENDS
constexpr bool kSends = true;  // the module may send rows of its result (gemm_sender_sm90.cuh)
#else
constexpr bool kSends = false;
#endif
constexpr int kStageK = kDepth * kSlabK;
// A swapped tile, for few rows of x, multiplies w x^T: wgmma's 64 rows are rows of the weight, and
// its columns are 16 or 32 rows of x. A consumer warpgroup multiplies one m-tile, so a tile has one
// or two of them; two warpgroups for a single m-tile divide its slabs.
constexpr int kSwappedWarpgroups = SWAPPED;  // 0: the tile is not swapped
constexpr bool kIsSwapped = kSwappedWarpgroups > 0;
constexpr bool kSplitsSlabs = kSwappedWarpgroups > 1 && kTileN <= kMmaM;
constexpr int kSlabStep =
    kSplitsSlabs ? kSwappedWarpgroups : 1;  // slabs from one of a warpgroup's to its next
constexpr int kSwappedTiles = kSplitsSlabs ? 1 : kSwappedWarpgroups;  // m-tiles of a swapped tile
static_assert(!kIsSwapped || (kTileN + kMmaM - 1) / kMmaM == kSwappedTiles,
              "an m-tile for each warpgroup, or one for two");
static_assert(kSwappedWarpgroups <= 2 && kDepth % kSlabStep == 0, "as many slabs for each of two");
// Consumer warpgroups split other tiles by rows, or by columns if three warpgroups would have too
// few registers each.
constexpr bool kSharesColumns = kTileM == 192 && kTileN > 192;
constexpr int kPlainWarpgroups = kTileM == 64 ? 1 : kTileM == 192 && !kSharesColumns ? 3 : 2;
constexpr int kConsumerWarpgroups = kIsSwapped ? kSwappedWarpgroups : kPlainWarpgroups;
// m-tiles per warpgroup, and their columns.
constexpr int kMmaTilesM =
    kIsSwapped ? 1 : kTileM / kMmaM / (kSharesColumns ? 1 : kPlainWarpgroups);
constexpr int kWarpgroupCols =
    kIsSwapped ? kTileM : kTileN / (kSharesColumns ? kPlainWarpgroups : 1);
constexpr bool kMayGate = kConsumerWarpgroups != 3;  // three warpgroups have too few registers
constexpr int kConsumerThreads = kConsumerWarpgroups * 128;
// The producer is one warp, or a whole warpgroup if registers move: setmaxnreg acts on warpgroups.
constexpr bool kMovesRegisters = !kIsSwapped && kConsumerWarpgroups > 1;
constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : 32);
// Thread indices.
constexpr int kFirstConsumer = kMovesRegisters ? 128 : 0;
constexpr int kProducer = kMovesRegisters ? 0 : kConsumerThreads;
constexpr int kPlainProducerRegisters = kConsumerWarpgroups == 3 ? 32 : kSharesColumns ? 24 : 40;
constexpr int kPlainConsumerRegisters = kConsumerWarpgroups == 3 ? 160 : kSharesColumns ? 240 : 232;
constexpr int kProducerRegisters = kSends ? 72 : kPlainProducerRegisters;
constexpr int kConsumerRegisters = kSends ? 216 : kPlainConsumerRegisters;
static_assert(!kSends || (kConsumerWarpgroups == 2 && !kSharesColumns), "registers to spare");
static_assert((kIsSwapped || kTileM % kMmaM == 0) && kTileN % 16 == 0 && kWarpgroupCols % 16 == 0,
              "tile sizes: whole m-tiles, pairs of 8 columns");

constexpr int kClusterSize = kClusterM * kClusterN * kClusterK;
static_assert(kTileM % (8 * kClusterN) == 0 && kTileN % (8 * kClusterM) == 0,
              "multicast parts are whole swizzle atoms of 8 rows");

// A warm-up pass pays off only for small tiles: large ones run long compared with fetching their
// instructions.
constexpr bool kWarmsUp = kTileM * kTileN <= 128 * 128;

// A CTA without multicast starts loading as soon as its own mbarriers are initialised.
constexpr bool kLoadsAlone = kClusterM * kClusterN == 1;

// Bytes of a slab of x and of the weight, and of a stage of the weight.
constexpr int kBytesX = kTileM * kSlabRowBytes, kBytesW = kTileN * kSlabRowBytes;
constexpr int kStageW = kDepth * kBytesW;
constexpr int kWarpStaging = 16 * 128;  // bytes of a warp's 16 rows of results
// Staging buffers of a warp: one is filled while TMA reads the other.
constexpr int kStagings = kStores ? 2 : 1;
// Swapped tiles have a buffer for each m-tile. In the last stage the last m-tile may extend past
// the tile: the staging memory holds all that it reads there.
constexpr int kSwappedPitch = kMmaM + 4;  // floats; 2 * kSwappedPitch is 8 mod 32: no conflicts
constexpr int kSwappedStaging = kTileM * kSwappedPitch * 4;
constexpr int kSwappedBytes = kSwappedTiles * kSwappedStaging;
constexpr int kBytesPast = (kSwappedTiles * kMmaM - kTileN) * kSlabRowBytes;
constexpr int kBytesStaging = !kIsSwapped ? kConsumerThreads / 32 * kStagings * kWarpStaging
                              : kSwappedBytes < kBytesPast ? kBytesPast
                                                           : kSwappedBytes;
// Columns that each CTA finishes when k is split, and the sums it receives from other CTAs.
constexpr int kSlice = kTileN / kClusterK;
constexpr int kBytesSums = (kClusterK - 1) * kTileM * kSlice * 4;
static_assert(kThreads == THREADS && kBytesStaging + kBytesSums == BYTES_BESIDE_STAGES,
              "HopperConfig in gemm/sm90.py computes other sizes");
static_assert(kClusterK == 1 || (kMmaTilesM == 1 && kSlice % 8 == 0),
              "a slice is whole 8 columns of one m-tile");
static_assert(kClusterK == 1 || kClusterM == 1, "with kClusterM > 1 a CTA could have no rows");

// Aligns to the swizzle's 1024-byte atoms; the offset is the same in every CTA of a cluster.
__device__ __forceinline__ unsigned char* align_smem(unsigned char* p) {
  return p + (-smem_address(p) & 1023);
}
