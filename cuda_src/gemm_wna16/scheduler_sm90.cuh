// Which work tiles a persistent CTA of gemm_wna16_sm90.cu computes, in which order.
#pragma once

#include "gemm_wna16/config_sm90.cuh"

struct WorkTile {
  int token;  // the first
  int block;  // of rows of the weight
};

// A cluster computes kClusterN blocks at a time. The order goes through a band of rows of x before
// the next blocks: the band stays in L2, and the weight is read once for it.
struct TileScheduler {
  static constexpr int kBand = 8;
  int tokens, blocks;  // tiles of tokens, and kClusterN blocks of the weight
  int rank_n, rank_k;  // of this CTA in its cluster

  __device__ __forceinline__ TileScheduler(int m, int num_blocks)
      : tokens((m + kTokens - 1) / kTokens), blocks((num_blocks + kClusterN - 1) / kClusterN) {
    const int rank = kClusterSize > 1 ? cluster_rank() : 0;
    rank_n = rank % kClusterN;
    rank_k = rank / kClusterN;
  }

  __device__ __forceinline__ int first() const { return blockIdx.x / kClusterSize; }
  __device__ __forceinline__ int step() const { return gridDim.x / kClusterSize; }
  __device__ __forceinline__ int count() const { return tokens * blocks; }
  __device__ __forceinline__ WorkTile tile(int index) const {
    const int band = index / (kBand * blocks), within = index - band * kBand * blocks;
    const int width = min(kBand, tokens - band * kBand);
    return {(band * kBand + within % width) * kTokens, within / width * kClusterN + rank_n};
  }
};
