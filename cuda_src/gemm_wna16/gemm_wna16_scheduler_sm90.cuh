// Which work tiles a persistent CTA of gemm_wna16_sm90.cu computes, in which order.
#pragma once

#include "gemm_wna16/gemm_wna16_config_sm90.cuh"

struct WorkTile {
  int token;  // the first
  int block;  // of rows of the weight
};

// The order goes through a band of rows of x before the next rows of the weight: the band stays in
// L2, and the weight is read once for it.
struct TileScheduler {
  static constexpr int kBand = 8;
  int tokens, blocks;  // tiles of each kind

  __device__ __forceinline__ int first() const { return blockIdx.x / kSplits; }
  __device__ __forceinline__ int step() const { return gridDim.x / kSplits; }
  __device__ __forceinline__ int count() const { return tokens * blocks; }
  __device__ __forceinline__ WorkTile tile(int index) const {
    const int band = index / (kBand * blocks), within = index - band * kBand * blocks;
    const int width = min(kBand, tokens - band * kBand);
    return {(band * kBand + within % width) * kTokens, within / width};
  }
};
