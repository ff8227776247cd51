// Work division of the skinny kernels that keep weights in a ring or in registers, and one block's
// part of it.
//
// k is split into parts of k_per_split values. A warp multiplies 16 weight rows by one part; a
// block has blockDim.y warps along k and blockDim.z along rows. The C blocks of a cluster share a
// tile: block r computes blockDim.y parts, from part r * blockDim.y on. The parts' sums are added
// in order, whichever warp or block computed them, so a row of out has the same bits for every m,
// cluster and block size with the same k_per_split.
#pragma once

#include "common/cluster.cuh"
#include "common/reduce.cuh"      // kWarpSize
#include "gemm/gemm_problem.cuh"  // kSumsInParts

constexpr int kStepK = 128;  // values of k per step of a warp: two 128-byte lines

// Template sizes: tokens / 8, stages of a warp's ring, buffers of partial sums.
template <int kTokenTiles_, int kStages_, int kBuffers_>
struct SkinnyShape {
  static constexpr int kTokenTiles = kTokenTiles_;
  static constexpr int kTokens = kTokenTiles * 8, kRows = 16;  // tokens and weight rows per warp
  static constexpr int kStages = kStages_, kBuffers = kBuffers_;
  static constexpr int kLoads = 8;  // 16-byte loads per lane and stage
  // Sets of independent accumulators, so that an mma need not wait for the previous one. A sum in
  // parts is one chain, the order of wgmma.
  static constexpr int kSets = kTokenTiles <= 2 && !kSumsInParts ? 4 : 1;
  static constexpr int kStageBytes = kLoads * kWarpSize * 16;
  // Padding of a row of x in bytes, against bank conflicts. Rows are read 16 bytes at a time; with
  // kSumsInParts 8 bytes at a time, or by ldmatrix if the weights are in a ring.
  static constexpr int kRowPad = !kSumsInParts ? 64 : kStages == 1 ? 32 : 16;
  static constexpr int kPitch = kRows + 4;             // 2 * kPitch is 8 mod 32: no bank conflicts
  static constexpr int kSumFloats = kTokens * kPitch;  // floats per warp
};

// The position of this block and warp in the problem, and the block's shared memory.
template <typename Shape>
struct SkinnyBlock {
  int lane_idx, warp_idx, num_warps, threads, thread;
  int size, rank;  // blocks in the cluster; rank of this block
  int tile, tile_step, num_tiles;
  int parts;                   // parts of k over all blocks of the cluster
  int part_k, k_begin, k_end;  // this warp's part of k
  int slice_begin, slice_end;  // this block's slice of k
  int num_gates;
  int x_pitch;          // bytes between rows of x
  unsigned char* ring;  // ring of this warp
  unsigned char* x;     // [token][slice of k]
  float* sums;          // [buffer][warp][token][row]

  __device__ __forceinline__ SkinnyBlock(const Problem& p, const SkinnyParams& params,
                                         unsigned char* smem) {
    lane_idx = threadIdx.x;
    warp_idx = threadIdx.z * blockDim.y + threadIdx.y;
    num_warps = blockDim.y * blockDim.z;
    threads = num_warps * kWarpSize;
    thread = warp_idx * kWarpSize + lane_idx;
    size = cluster_size();
    rank = cluster_rank();
    tile = cluster_index();
    tile_step = num_clusters();
    num_tiles = params.num_tiles;
    num_gates = params.num_gates;
    parts = size * blockDim.y;
    part_k = p.k_per_split;
    k_begin =
        min(p.k, (rank * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y)) * part_k);
    k_end = min(p.k, k_begin + part_k);
    slice_begin = min(p.k, rank * static_cast<int>(blockDim.y) * part_k);
    slice_end = min(p.k, slice_begin + static_cast<int>(blockDim.y) * part_k);
    x_pitch = static_cast<int>(blockDim.y) * part_k * 2 + Shape::kRowPad;
    ring = smem + warp_idx * (params.num_stages * Shape::kStageBytes);
    x = smem + num_warps * (params.num_stages * Shape::kStageBytes);
    sums = reinterpret_cast<float*>(x + p.m * x_pitch);
  }

  __device__ __forceinline__ int row0(int tile) const {
    return (tile * static_cast<int>(blockDim.z) + static_cast<int>(threadIdx.z)) * Shape::kRows;
  }
  __device__ __forceinline__ scalar_t* x_row(int row) const {
    return reinterpret_cast<scalar_t*>(x + row * x_pitch);
  }
};

// Blocks with blockIdx.y > 0 handle the tokens that exceed the capacity of the preceding blocks.
template <typename Shape>
__device__ __forceinline__ Problem problem_of_block(Problem p) {
  const int token0 = blockIdx.y * Shape::kTokens;
  Epilogue& e = p.epilogue;
  const int size = e.is_float ? sizeof(float) : sizeof(scalar_t);
  p.x += token0 * p.x_stride;
  p.m = min(p.m - token0, Shape::kTokens);
  e.out = static_cast<char*>(e.out) + token0 * e.out_stride * size;
  if (e.residual != nullptr)
    e.residual = static_cast<const char*>(e.residual) + token0 * e.residual_stride * size;
  return p;
}

// Barrier among the warps that share rows of the weight.
template <typename Shape>
__device__ __forceinline__ void skinny_sync(const SkinnyBlock<Shape>& b) {
  if (b.size > 1)
    cluster_sync(b.size);
  else if (blockDim.y > 1)
    asm volatile("bar.sync %0, %1;\n" ::"r"(threadIdx.z + 1), "r"(blockDim.y * kWarpSize)
                 : "memory");
  else
    __syncwarp();
}
