// Tiled float32 GEMM on CUDA cores (no TF32): cp.async into a ring of shared-memory stages, and
// kPerThread x kPerThread outputs in each thread's registers.
//
// Every tile shape sums k in ascending order.
#pragma once

#include "common/tile_epilogue.cuh"
#include "common/tile_loader.cuh"

constexpr int kSimtThreads = 256;

// Thread (ty, tx) of 16 x 16 computes rows ty + 16 i and columns tx + 16 j. A warp covers 4 x 8
// threads, so its reads of x are broadcasts and its reads of the weight are free of bank conflicts.
// kColumnsA, kColumnsB: that operand's tile has rows along k (ColumnTileLoader).
template <int kPerThread, bool kColumnsA = false, bool kColumnsB = false>
struct SimtCore {
  using V = Vec<float, kVec>;
  float acc[kPerThread][kPerThread] = {};
  int row, col;

  __device__ __forceinline__ SimtCore() {
    const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
    row = warp_idx / 2 * 4 + lane_idx / 8;
    col = warp_idx % 2 * 8 + lane_idx % 8;
  }

  __device__ __forceinline__ void multiply(const unsigned char* smem_a,
                                           const unsigned char* smem_b) {
#pragma unroll 1  // unrolled, it would need too many registers
    for (int chunk = 0; chunk < kChunksPerRow; ++chunk) {
      V a[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) a[i] = chunk_of<kColumnsA>(smem_a, row, chunk, i);
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const V b = chunk_of<kColumnsB>(smem_b, col, chunk, j);
#pragma unroll
        for (int k = 0; k < kVec; ++k)
#pragma unroll
          for (int i = 0; i < kPerThread; ++i) acc[i][j] += a[i].v[k] * b.v[k];
      }
    }
  }

  // Returns the operand's kVec values of k in `chunk`, of row or column `first` + 16 i.
  template <bool kColumns>
  __device__ __forceinline__ V chunk_of(const unsigned char* smem, int first, int chunk, int i) {
    if constexpr (!kColumns) {
      const unsigned char* from = smem + swizzled(first, chunk) + i * 16 * kTileRowBytes;
      return load_vec<float, kVec>(reinterpret_cast<const float*>(from));
    } else {
      constexpr int kCols = kPerThread * 16;
      const float* from = reinterpret_cast<const float*>(smem) + chunk * kVec * kCols + first;
      V x;
#pragma unroll
      for (int k = 0; k < kVec; ++k) x.v[k] = from[k * kCols + i * 16];
      return x;
    }
  }

  // Stores 16 rows of the whole block at a time; see MmaCore::store.
  template <typename E>
  __device__ __forceinline__ void store(const E& e, float* staging, TileOrigin origin, int m,
                                        int n) {
    constexpr int kCols = kPerThread * 16, kPitch = kCols + 8;
#pragma unroll 1
    for (int slice = 0; slice < kPerThread; ++slice) {
      __syncthreads();  // SAFETY: all threads have read the previous slice.
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
        if (i == slice) {
#pragma unroll
          for (int j = 0; j < kPerThread; ++j) staging[row * kPitch + col + j * 16] = acc[i][j];
        }
      __syncthreads();
      using Rows = Slice<kCols, kPitch, kSimtThreads, kPerThread <= 4>;
      store_slice(e, Rows{staging, static_cast<int>(threadIdx.x), origin.row + slice * 16,
                          origin.col, m, n});
    }
  }
};

// mma_sums for CUDA cores. There is no final barrier: other threads may still be reading the last
// stage.
template <int kStages, int kTileBytes, typename Core, typename LoaderX, typename LoaderW,
          typename Prepare>
__device__ __forceinline__ void simt_sums(Core& core, const LoaderX& x, const LoaderW& weight,
                                          unsigned char* smem, int k_begin, int k_end,
                                          const Prepare& prepare) {
  const int num_tiles = (k_end - k_begin + kTileK - 1) / kTileK;
  const auto stage = [&](int tile) { return smem + tile % kStages * 2 * kTileBytes; };
  const auto load = [&](int tile) {
    if (tile < num_tiles) {
      x.load(stage(tile), k_begin + tile * kTileK, k_end);
      weight.load(stage(tile) + kTileBytes, k_begin + tile * kTileK, k_end);
    }
    cp_async_commit();  // even if empty: the wait counts groups
  };

#pragma unroll
  for (int tile = 0; tile < kStages - 1; ++tile) load(tile);
  for (int tile = 0; tile < num_tiles; ++tile) {
    cp_async_wait<kStages - 2>();
    prepare(stage(tile), k_begin + tile * kTileK);
    __syncthreads();  // SAFETY: `tile` is visible to all, and all have read tile - 1.
    load(tile + kStages - 1);
    core.multiply(stage(tile), stage(tile) + kTileBytes);
  }
  cp_async_wait<0>();
}
