// Work division of the kernels for few rows, and a warp's part of it.
//
// A work tile is blockDim.z row tiles (16 rows each) of the weight. The C blocks of a cluster
// compute it together, then go on to every num_clusters-th work tile. k is divided into stages of
// kStageTiles tiles; warp (y, z) of block r multiplies row tile z of the work tile by part_stages
// stages, from stage (r * blockDim.y + y) * part_stages on. The parts' sums are added in order. A
// block loads x for its own parts only.
//
// With ROUNDS_WEIGHTS (gemm_wna16_stream_sm90.cu) the parts are those of gemm_wna16_sm90.cu, which
// begin at multiples of kPartTiles tiles. If a part begins within a stage, two warps load it.
#pragma once

#include "common/cluster.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"  // kWarpSize
#include "common/weight_stage.cuh"
#include "gemm_wna16/gemm_wna16_problem.cuh"

#ifdef ROUNDS_WEIGHTS
constexpr bool kRoundsWeights = true;
#else
constexpr bool kRoundsWeights = false;
#endif
// Most rows of x for which GroupColumnsProduct is used; 0: never. With groups of 16 values its
// product for four rows takes as many instructions as the other one for eight.
#if GROUP <= 32 && BITS < 8 && !E2M1 && !defined(ROUNDS_WEIGHTS)
#define ENGINE_COLUMN_TOKENS (GROUP == 16 ? 2 : 4)
#else
#define ENGINE_COLUMN_TOKENS 0
#endif
constexpr int kPartTiles = 2;  // kPartSlabs in gemm_wna16_config_sm90.cuh

// Returns the tile of k at which part `index` of `parts` begins.
__device__ __forceinline__ int part_begin(int k_tiles, int index, int parts) {
  return (k_tiles + kPartTiles - 1) / kPartTiles * index / parts * kPartTiles;
}

struct FewRowsBlock {
  int lane_idx, warp_idx, num_warps, threads, thread;
  int size, rank;  // blocks in the cluster; rank of this block
  int k_tiles, row_tiles;
  int stage_begin, stage_end;  // this warp's range of stages of k
  int tile_begin, tile_end;    // its range of tiles of k; set only with kRoundsWeights
  int gate_tiles;              // row tiles of gate; 0: not gated
  int x_begin, x_columns;      // start of this block's slice of k; its width with padding
  int x_pitch;                 // bytes between rows of x
  unsigned char* ring;         // this warp's ring
  unsigned char* x;            // [token][column]
  float* x_sums;               // [group][token] sums of x, if kNeedsXSums
  float* sums;                 // [buffer][warp][token][row]

  bool may_share;  // whether a cluster has more than one block

  // `tokens`: the kernel's, of which p.m exist.
  __device__ __forceinline__ FewRowsBlock(const FewRowsParams& p, unsigned char* smem, int tokens)
      : may_share(tokens > 1) {
    lane_idx = threadIdx.x;
    warp_idx = threadIdx.z * blockDim.y + threadIdx.y;
    num_warps = blockDim.y * blockDim.z;
    threads = num_warps * kWarpSize;
    thread = warp_idx * kWarpSize + lane_idx;
    k_tiles = (p.k + kTileColumns - 1) / kTileColumns;
    row_tiles = (p.n + kTileRows - 1) / kTileRows;
    size = may_share ? cluster_size() : 1;
    rank = may_share ? cluster_rank() : 0;
    const int stages = (k_tiles + kStageTiles - 1) / kStageTiles;
    const int block_stages = static_cast<int>(blockDim.y) * p.part_stages;
    const int first = min(stages, rank * block_stages);
    stage_begin = min(stages, first + static_cast<int>(threadIdx.y) * p.part_stages);
    stage_end = min(stages, stage_begin + p.part_stages);
    gate_tiles = p.activation == kSiluAndMul ? row_tiles / 2 : 0;
    x_begin = first * kStageColumns;
    x_columns = (min(stages, first + block_stages) - first) * kStageColumns;
    if constexpr (kRoundsWeights) set_part();
    // An odd multiple of 16: no bank conflicts for ldmatrix.
    x_pitch = block_stages * (kStageColumns * 2) + 16;
    ring = smem + warp_idx * (p.num_stages * kStageBytes);
    x = smem + num_warps * (p.num_stages * kStageBytes);
    x_sums = reinterpret_cast<float*>(x + p.m * x_pitch);
    sums = x_sums + block_stages * kStageGroups * (tokens <= ENGINE_COLUMN_TOKENS ? tokens : 1);
  }

  // Sets the ranges along k of this warp's part and of the block's x.
  __device__ __forceinline__ void set_part() {
    const int parts = blockDim.y, first = rank * parts;  // the block's parts
    const auto begin = [&](int index) { return part_begin(k_tiles, index, size * parts); };
    const auto stages = [](int tiles) { return (tiles + kStageTiles - 1) / kStageTiles; };
    tile_begin = begin(first + threadIdx.y), tile_end = begin(first + threadIdx.y + 1);
    stage_begin = tile_begin / kStageTiles, stage_end = stages(tile_end);
    x_begin = begin(first) / kStageTiles * kStageColumns;
    x_columns = stages(begin(first + parts)) * kStageColumns - x_begin;
  }

  __device__ __forceinline__ int first_work_tile() const {
    return may_share ? cluster_index() : blockIdx.x;
  }
  __device__ __forceinline__ int work_tile_step() const {
    return may_share ? num_clusters() : gridDim.x;
  }

  // Returns row tile z of a work tile. If gated, even row tiles belong to gate, and odd ones are
  // the matching row tiles of up.
  __device__ __forceinline__ int row_tile(int work_tile, int z) const {
    const int index = work_tile * static_cast<int>(blockDim.z) + z;
    return gate_tiles == 0 ? index : index / 2 + index % 2 * gate_tiles;
  }
  __device__ __forceinline__ scalar_t* x_row(int token) const {
    return reinterpret_cast<scalar_t*>(x + token * x_pitch);
  }
};
