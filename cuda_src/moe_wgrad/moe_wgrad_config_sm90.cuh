// Work tile, ring of stages and shared memory of moe_wgrad_sm90.cu.
//
// A is the gathered operand, B the sorted one. A stage holds a slab: 64 rows of the sum, of kTileA
// columns of A and kTileB columns of B. Both lie in chunks of 64 columns, with a row of 128 bytes
// for each row of the sum.
#pragma once

#include "common/pipeline_state.cuh"
#include "common/sm90.cuh"
#include "common/wgmma.cuh"
#include "moe_wgrad/moe_wgrad_problem.cuh"

constexpr bool kGathersX = GATHERS_X != 0;  // A is x, and B dy; otherwise A is dy, and B x
constexpr int kTileA = 128, kTileB = 256;
constexpr int kCluster = 2;  // CTAs with neighbouring tiles of A: each loads half of their B
constexpr int kStages = 4;
constexpr int kSlabRows = 64;
constexpr int kChunkColumns = 64, kChunkBytes = kSlabRows * 128;
constexpr int kChunksA = kTileA / kChunkColumns, kChunksB = kTileB / kChunkColumns;
constexpr int kBytesA = kChunksA * kChunkBytes, kBytesB = kChunksB * kChunkBytes;
constexpr int kWarpgroups = kChunksA;  // consumers: each has 64 columns of A
constexpr int kProducerThreads = 128;
constexpr int kThreads = kWarpgroups * 128 + kProducerThreads;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(kConsumerRegisters * kWarpgroups + kProducerRegisters <= 168 * 3, "registers");
constexpr int kStaging = 64 * 128;  // bytes of a warpgroup's 64 x 64 results

// Dynamic shared memory, aligned to the swizzle's atoms.
struct WgradShared {
  unsigned char a[kStages][kBytesA];
  unsigned char b[kStages][kBytesB];
  unsigned char staging[kWarpgroups][2][kStaging];
  uint64_t full[kStages], empty[kStages];
};
static_assert(kThreads == THREADS && sizeof(WgradShared) + 1024 == SHARED_BYTES,
              "kernels/moe_wgrad/sm90.py computes other sizes");

struct MoeWgradSm90Params {
  TensorMap map_sorted;  // B (P, columns), box: 64 rows x 64 columns
  TensorMap map_out;     // out (E, R, K), box: 64 columns x 16 rows, or x 64 rows if A is x
  const scalar_t* dy;    // (P, R), or gathered (T, R)
  const scalar_t* x;     // (P, K), or gathered (T, K)
  const int* order;      // (P,)
  const int* offsets;    // (E + 1,)
  int num_experts, num_pairs, num_rows, k, top_k;
};

// A CTA's tile of an expert's matrix: its first columns of A and of B.
struct WgradTile {
  int expert, a, b;
};

// Clusters take tiles ordered by expert, then by B: those that run together read the same rows from
// L2.
struct WgradScheduler {
  int pairs_a, tiles, count, rank;

  __device__ __forceinline__ explicit WgradScheduler(const MoeWgradSm90Params& p)
      : pairs_a(((kGathersX ? p.k : p.num_rows) + kCluster * kTileA - 1) / (kCluster * kTileA)),
        tiles(pairs_a * (((kGathersX ? p.num_rows : p.k) + kTileB - 1) / kTileB)),
        count(tiles * p.num_experts),
        rank(cluster_rank()) {}

  __device__ __forceinline__ int first() const { return blockIdx.x / kCluster; }
  __device__ __forceinline__ int step() const { return gridDim.x / kCluster; }
  __device__ __forceinline__ WgradTile tile(int index) const {
    const int expert = index / tiles, local = index - expert * tiles;
    return {expert, (local % pairs_a * kCluster + rank) * kTileA, local / pairs_a * kTileB};
  }
};
