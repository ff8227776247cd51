// The work tile that a module of gemm_sm90.cu is compiled for, given by -D (HopperConfig in
// engine/kernels/gemm/sm90.py), and what follows from it: warpgroup roles, registers, shared memory.
#pragma once

#include "common/sm90.cuh"

constexpr int kTileM = TILE_M, kTileN = TILE_N;
constexpr int kClusterM = CLUSTER_M, kClusterN = CLUSTER_N, kClusterK = CLUSTER_K;
constexpr int kBlockK = 64;       // of k: 128 bytes a row, the widest swizzle
constexpr int kDepth = DEPTH;     // such blocks in a stage
constexpr int kStages = STAGES;   // of the ring; with tiles of 64 rows the launch says how many
constexpr bool kStores = STORES;  // results by TMA, while the next tile is multiplied
constexpr int kStageK = kDepth * kBlockK;
// Consumer warpgroups divide a tile's rows, or its columns where three warpgroups would have too few
// registers each.
constexpr bool kSharesColumns = kTileM == 192 && kTileN > 192;
constexpr int kWarpgroups = kTileM == 64 ? 1 : kTileM == 192 && !kSharesColumns ? 3 : 2;
constexpr int kBlocksM =
    kTileM / 64 / (kSharesColumns ? 1 : kWarpgroups);  // of 64 rows, a warpgroup
constexpr int kWarpgroupCols = kTileN / (kSharesColumns ? kWarpgroups : 1);
constexpr bool kMayGate = kWarpgroups != 3;  // three warpgroups have too few registers to gate
constexpr int kConsumers = kWarpgroups * 128;
// One producer warp; a whole warpgroup where registers move, which setmaxnreg does by warpgroup.
constexpr bool kMovesRegisters = kWarpgroups > 1;
constexpr int kThreads = kConsumers + (kMovesRegisters ? 128 : 32);
constexpr int kFirstConsumer = kMovesRegisters ? 128 : 0;
constexpr int kProducer = kMovesRegisters ? 0 : kConsumers;
constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : kSharesColumns ? 24 : 40;
constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kSharesColumns ? 240 : 232;
static_assert(kTileM % 64 == 0 && kTileN % 16 == 0 && kWarpgroupCols % 16 == 0,
              "tile sizes: whole blocks of 64 rows, pairs of 8 columns");

constexpr int kClusterSize = kClusterM * kClusterN * kClusterK;
static_assert(kTileM % (8 * kClusterN) == 0 && kTileN % (8 * kClusterM) == 0,
              "multicast parts are whole swizzle atoms of 8 rows");

// A warm-up pass pays for small tiles only: large ones run long after their first instructions.
constexpr bool kWarmsUp = kTileM * kTileN <= 128 * 128;

// A block without multicast starts to load as soon as its own mbarriers are initialised.
constexpr bool kLoadsAlone = kClusterM * kClusterN == 1;

constexpr int kRowBytes = 128;
constexpr int kBytesX = kTileM * kRowBytes, kBytesW = kTileN * kRowBytes;  // of a block of k
constexpr int kStageW = kDepth * kBytesW;
constexpr int kWarpStaging = 16 * 128;  // bytes of a warp's 16 rows of results
constexpr int kStagings =
    kStores ? 2 : 1;  // buffers of a warp: one is filled while TMA reads the other
constexpr int kBytesStaging = kConsumers / 32 * kStagings * kWarpStaging;
constexpr int kSlice =
    kTileN / kClusterK;  // columns that a block finishes of a tile shared along k
constexpr int kBytesSums = (kClusterK - 1) * kTileM * kSlice * 4;  // received from the other blocks
static_assert(kClusterK == 1 || (kBlocksM == 1 && kSlice % 8 == 0),
              "a slice is whole 8 columns of one block of rows");
static_assert(kClusterK == 1 || kClusterM == 1, "with kClusterM > 1 a block could have no rows");

// Aligns to the swizzle's atoms of 1024 bytes; the offset is the same in every block of a cluster.
__device__ __forceinline__ unsigned char* align_smem(unsigned char* p) {
  return p + (-smem_address(p) & 1023);
}
