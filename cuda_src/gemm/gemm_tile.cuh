// Tiled kernels of gemm.cu: a block computes one tile of out, or a partial of it if k is split.
#pragma once

#include "common/mma_tile.cuh"
#include "common/simt_tile.cuh"
#include "gemm/gemm_problem.cuh"

// Applies the norm in place to the chunks of x's tile that this thread has loaded. Call it after
// the thread's own cp_async_wait, before the barrier that makes the chunks visible to other
// threads.
template <typename Loader, bool kAligned, bool kEnabled>
struct TileNorm {
  const Norm norm;
  int row0;

  __device__ __forceinline__ void apply(const Loader& loader, unsigned char* smem, int k,
                                        int k_end) const {
    if constexpr (!kEnabled) return;
    using V = Vec<scalar_t, kVec>;
    const int column = k + loader.column;
    if (column >= k_end) return;  // zeros stay zeros
    V w = {};
    if constexpr (kAligned) {
      w = load_vec<scalar_t, kVec>(norm.weight + column);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j)
        if (column + j < k_end) w.v[j] = norm.weight[column + j];
    }
#pragma unroll 2  // not 4: registers are scarce here
    for (int i = 0; i < Loader::kNumRows; ++i) {
      scalar_t* p = reinterpret_cast<scalar_t*>(smem + loader.smem_offset +
                                                i * Loader::kRowStep * kTileRowBytes);
      const int row = row0 + loader.first_row + i * Loader::kRowStep;
      // Reloaded from L1 each time: no register is free for it.
      const float scale = loader.has_row(i) ? norm.row_scales[row] : 0.0f;
      V x = load_vec<scalar_t, kVec>(p);
#pragma unroll
      for (int j = 0; j < kVec; ++j) x.v[j] = norm.apply(x.v[j], scale, w.v[j]);
      store_vec(p, x);
    }
  }
};

// Stores this block's sums: to `out` through the epilogue or, if k is split, unchanged to its
// partials. Two calls let the compiler specialise the second, which needs few registers.
template <typename Store>
__device__ __forceinline__ void store_tile(const Problem& p, const Store& store) {
  if (p.partials == nullptr) {
    store(p.epilogue);
  } else {
    float* partials = p.partials + static_cast<int64_t>(blockIdx.y) * p.m * p.n;
    store(Epilogue{nullptr, nullptr, partials, 0, p.n, kIdentity, true, p.n % 4 == 0});
  }
}

// One block computes a kTileM x kTileN tile of out, or a partial of it if k is split. Dynamic
// shared memory: kStages * (kTileM + kTileN) * kTileRowBytes.
template <int kTileM, int kTileN, int kWarpM, int kWarpN, int kStages, bool kAligned, bool kNorm>
__device__ __forceinline__ void mma_tile(const Problem& p) {
  constexpr int kWarpsN = kTileN / kWarpN;
  constexpr int kThreads = kTileM / kWarpM * kWarpsN * kWarpSize;
  constexpr int kBytesA = kTileM * kTileRowBytes, kStageBytes = (kTileM + kTileN) * kTileRowBytes;
  using Core = MmaCore<kWarpM, kWarpN>;
  using LoaderX = TileLoader<kTileM, kThreads, kAligned>;
  using LoaderW = TileLoader<kTileN, kThreads, kAligned>;
  static_assert(kThreads / kWarpSize * Core::kStagingBytes <= kStages * kStageBytes, "staging");
  extern __shared__ __align__(128) unsigned char smem[];

  const TileOrigin origin = tile_origin<kTileM, kTileN>(p.m, p.n);
  const int warp_idx = threadIdx.x / kWarpSize;
  const int warp_row = warp_idx / kWarpsN * kWarpM, warp_col = warp_idx % kWarpsN * kWarpN;
  const int k_begin = blockIdx.y * p.k_per_split;
  const int k_end = min(p.k, k_begin + p.k_per_split);

  const LoaderX x(p.x, p.x_stride, origin.row, p.m);
  const LoaderW weight(p.weight, p.k, origin.col, p.n);
  const TileNorm<LoaderX, kAligned, kNorm> norm{p.norm, origin.row};
  Core core(warp_row, warp_col);
  mma_sums<kStages, kBytesA, kStageBytes>(
      core, x, weight, smem, k_begin, k_end,
      [&](unsigned char* tile, int k) { norm.apply(x, tile, k, k_end); });
  float* staging = reinterpret_cast<float*>(smem) + warp_idx * (Core::kStagingBytes / 4);
  store_tile(p, [&](const Epilogue& e) {
    core.store(e, staging, origin.row + warp_row, origin.col + warp_col, p.m, p.n);
  });
}

// One block computes a square tile of out with side kPerThread * 16, or a partial of it if k is
// split. Dynamic shared memory: kStages * 2 * kPerThread * 16 * kTileRowBytes.
template <int kPerThread, int kStages, bool kAligned, bool kNorm>
__device__ __forceinline__ void simt_tile(const Problem& p) {
  constexpr int kTile = kPerThread * 16;
  constexpr int kTileBytes = kTile * kTileRowBytes, kStageBytes = 2 * kTileBytes;
  using Loader = TileLoader<kTile, kSimtThreads, kAligned>;
  static_assert(16 * (kTile + 8) * 4 <= kStages * kStageBytes, "staging");
  extern __shared__ __align__(128) unsigned char smem[];

  const TileOrigin origin = tile_origin<kTile, kTile>(p.m, p.n);
  const int k_begin = blockIdx.y * p.k_per_split;
  const int k_end = min(p.k, k_begin + p.k_per_split);

  const Loader x(p.x, p.x_stride, origin.row, p.m);
  const Loader weight(p.weight, p.k, origin.col, p.n);
  const TileNorm<Loader, kAligned, kNorm> norm{p.norm, origin.row};
  SimtCore<kPerThread> core;
  simt_sums<kStages, kTileBytes>(
      core, x, weight, smem, k_begin, k_end,
      [&](unsigned char* tile, int k) { norm.apply(x, tile, k, k_end); });
  store_tile(p, [&](const Epilogue& e) {
    core.store(e, reinterpret_cast<float*>(smem), origin, p.m, p.n);
  });
}
