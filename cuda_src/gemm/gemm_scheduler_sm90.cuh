// The tile scheduler of gemm_sm90.cu: the work tiles of a persistent CTA and their order.
#pragma once

#include "gemm/gemm_config_sm90.cuh"

// A cluster computes one super-tile of kClusterM x kClusterN tiles at a time. The order runs down
// `band` rows of super-tiles before it moves right, so that concurrent tiles read few rows of x and
// weight, which stay in L2.
struct TileScheduler {
  int m, n, band, rows, cols;  // rows and cols count super-tiles
  int rank_m, rank_n, rank_k;  // coordinates of this CTA in its cluster
  int first_k, last_k;         // stages of k that this CTA sums

  __device__ __forceinline__ TileScheduler(int m, int n, int k, int band)
      : m(m),
        n(n),
        band(band),
        rows((m + kTileM * kClusterM - 1) / (kTileM * kClusterM)),
        cols((n + kTileN * kClusterN - 1) / (kTileN * kClusterN)) {
    const int rank = kClusterSize > 1 ? static_cast<int>(cluster_rank()) : 0;
    rank_m = rank % kClusterM;
    rank_n = rank / kClusterM % kClusterN;
    rank_k = rank / (kClusterM * kClusterN);
    const int stages_k = (k + kStageK - 1) / kStageK;
    first_k = stages_k * rank_k / kClusterK;
    last_k = stages_k * (rank_k + 1) / kClusterK;
  }

  __device__ __forceinline__ int first() const { return blockIdx.x / kClusterSize; }
  __device__ __forceinline__ int step() const { return gridDim.x / kClusterSize; }
  __device__ __forceinline__ int count() const { return rows * cols; }

  // Returns the first row and column of this CTA's tile in super-tile `index`.
  __device__ __forceinline__ int2 tile(int index) const {
    if (rows == 1) return {rank_m * kTileM, (index * kClusterN + rank_n) * kTileN};
    const int band_idx = index / (band * cols), within = index - band_idx * band * cols;
    const int height = min(band, rows - band_idx * band);
    const int row = band_idx * band + within % height, col = within / height;
    return {(row * kClusterM + rank_m) * kTileM, (col * kClusterN + rank_n) * kTileN};
  }
};
