// The tile scheduler of gemm_wna16_sm90.cu: the work tiles of a persistent CTA and their order.
#pragma once

#include "gemm_wna16/gemm_wna16_config_sm90.cuh"

struct WorkTile {
  int token;  // first token
  int block;  // block of weight rows
};

// The order covers a band of rows of x before it moves to the next weight rows: the band stays in
// L2, and the weight is read once per band.
struct TileScheduler {
  static constexpr int kBand = 8;
  int tokens, blocks;  // number of tiles along each axis

  __device__ __forceinline__ int first() const { return blockIdx.x / kSplits; }
  __device__ __forceinline__ int step() const { return gridDim.x / kSplits; }
  __device__ __forceinline__ int count() const { return tokens * blocks; }
  __device__ __forceinline__ WorkTile tile(int index) const {
    const int band = index / (kBand * blocks), within = index - band * kBand * blocks;
    const int width = min(kBand, tokens - band * kBand);
    return {(band * kBand + within % width) * kTokens, within / width};
  }
};
