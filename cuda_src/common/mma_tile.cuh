// Tiled 16-bit GEMM on tensor cores: cp.async into a ring of kStages shared-memory stages, ldmatrix
// one step ahead of mma, float accumulation.
//
// Every tile shape sums k in ascending steps of 16, so results depend on the number of splits along
// k, but not on the tile shape or on m.
#pragma once

#include "common/mma.cuh"
#include "common/tile_epilogue.cuh"
#include "common/tile_loader.cuh"

// A warp's kWarpM x kWarpN part of the tile: accumulators, and two sets of operand fragments.
// kColumnsA and kColumnsB: 0 if the operand's tile has rows along m or n (TileLoader); the number
// of its columns if it has rows along k (ColumnTileLoader).
template <int kWarpM, int kWarpN, int kColumnsA = 0, int kColumnsB = 0>
struct MmaCore {
  static constexpr int kTilesM = kWarpM / 16, kTilesN = kWarpN / 8;
  static constexpr int kPitch = kWarpN + 8;  // floats; 8 mod 32: no bank conflicts
  static constexpr int kStagingBytes = 16 * kPitch * 4;

  float acc[kTilesM][kTilesN][4] = {};
  uint32_t frag_a[2][kTilesM][4];
  uint32_t frag_b[2][kTilesN / 2][4];
  int offset_a, offset_b;  // offset of this lane's first ldmatrix address in each operand's tile

  __device__ __forceinline__ MmaCore(int warp_row, int warp_col) {
    const int lane_idx = threadIdx.x % kWarpSize;
    // Matrix order of a[0..3]: rows 0-7, rows 8-15, then the same rows at k + 8.
    offset_a = swizzled(warp_row + lane_idx % 16, lane_idx / 16);
    // Two n-tiles per load: b[0], b[1] of columns 0-7, then of columns 8-15.
    offset_b = swizzled(warp_col + lane_idx % 8 + lane_idx / 16 * 8, lane_idx / 8 % 2);
    // The same matrices, transposed by ldmatrix.
    if constexpr (kColumnsA > 0)
      offset_a = swizzled_column<kColumnsA>(lane_idx % 8 + lane_idx / 16 * 8,
                                            warp_row / 8 + lane_idx / 8 % 2);
    if constexpr (kColumnsB > 0)
      offset_b = swizzled_column<kColumnsB>(lane_idx % 16, warp_col / 8 + lane_idx / 16);
  }

  // Loads the fragments of a stage's k-step kStep (16 wide) into fragment set kStep.
  template <int kStep>
  __device__ __forceinline__ void load(const unsigned char* smem_a, const unsigned char* smem_b) {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i)
      load_fragment<kColumnsA, kStep>(frag_a[kStep][i], smem_a, offset_a, i);
#pragma unroll
    for (int j = 0; j < kTilesN / 2; ++j)
      load_fragment<kColumnsB, kStep>(frag_b[kStep][j], smem_b, offset_b, j);
  }

  // Loads 16 rows or columns of an operand, those from 16 * i on.
  template <int kColumns, int kStep>
  __device__ __forceinline__ void load_fragment(uint32_t (&frag)[4], const unsigned char* smem,
                                                int offset, int i) {
    if constexpr (kColumns == 0) {
      constexpr int kFlip = kStep * 2 << 4;  // chunk + 2, after the swizzle
      ldmatrix_x4(frag, smem + (offset ^ kFlip) + i * 16 * kTileRowBytes);
    } else {  // chunk + 2 i; a warp's columns start at a multiple of its own chunks
      ldmatrix_x4_trans(frag, smem + (offset ^ (i * 2 << 4)) + kStep * 16 * kColumns * 2);
    }
  }

  template <int kStep>
  __device__ __forceinline__ void multiply() {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i)
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        const uint32_t b[2] = {frag_b[kStep][j / 2][j % 2 * 2],
                               frag_b[kStep][j / 2][j % 2 * 2 + 1]};
        mma_m16n8k16<scalar_t>(acc[i][j], frag_a[kStep][i], b);
      }
  }

  // Stores through this warp's part of shared memory, 16 rows at a time, so that global memory is
  // written in whole lines. The outer loop stays rolled to keep a single copy of the epilogue's
  // code.
  template <typename E>
  __device__ __forceinline__ void store(const E& e, float* staging, int row0, int col0, int m,
                                        int n) {
    const int lane_idx = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int slice = 0; slice < kTilesM; ++slice) {
      __syncwarp();  // SAFETY: all lanes have read the previous slice.
#pragma unroll
      for (int i = 0; i < kTilesM; ++i)
        if (i == slice) stage(acc[i], staging, lane_idx);
      __syncwarp();
      using Rows = Slice<kWarpN, kPitch, kWarpSize, kWarpM == 64 || kWarpN == 32>;
      store_slice(e, Rows{staging, lane_idx, row0 + slice * 16, col0, m, n});
    }
  }

  __device__ __forceinline__ void stage(const float (&rows)[kTilesN][4], float* staging,
                                        int lane_idx) {
    float* p = staging + lane_idx / 4 * kPitch + lane_idx % 4 * 2;
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      store_vec(p + j * 8, Vec<float, 2>{rows[j][0], rows[j][1]});
      store_vec(p + j * 8 + 8 * kPitch, Vec<float, 2>{rows[j][2], rows[j][3]});
    }
  }
};

// Accumulates the product over k in [k_begin, k_end). `prepare(smem, k)` modifies x's tile in place
// before it becomes visible to threads that did not load it. On return no thread reads the stages
// any more.
template <int kStages, int kBytesA, int kStageBytes, typename Core, typename LoaderX,
          typename LoaderW, typename Prepare>
__device__ __forceinline__ void mma_sums(Core& core, const LoaderX& x, const LoaderW& weight,
                                         unsigned char* smem, int k_begin, int k_end,
                                         const Prepare& prepare) {
  static_assert(kTileK == 32 || sizeof(scalar_t) == 4, "two steps of 16 a stage");
  const int num_tiles = (k_end - k_begin + kTileK - 1) / kTileK;
  const auto stage = [&](int tile) { return smem + tile % kStages * kStageBytes; };
  const auto load = [&](int tile) {
    if (tile < num_tiles) {
      x.load(stage(tile), k_begin + tile * kTileK, k_end);
      weight.load(stage(tile) + kBytesA, k_begin + tile * kTileK, k_end);
    }
    cp_async_commit();  // even if empty: the wait counts groups
  };
  // Waits until `tile` has arrived for every thread. SAFETY: the barrier also guarantees that all
  // warps have read the fragments of tile - 1, so its stage may be refilled.
  const auto await = [&](int tile) {
    cp_async_wait<kStages - 2>();
    if (tile < num_tiles) prepare(stage(tile), k_begin + tile * kTileK);
    __syncthreads();
  };

#pragma unroll
  for (int tile = 0; tile < kStages - 1; ++tile) load(tile);
  await(0);
  if (num_tiles > 0) core.template load<0>(stage(0), stage(0) + kBytesA);
  for (int tile = 0; tile < num_tiles; ++tile) {
    core.template load<1>(stage(tile), stage(tile) + kBytesA);
    load(tile + kStages - 1);
    core.template multiply<0>();
    await(tile + 1);
    if (tile + 1 < num_tiles) core.template load<0>(stage(tile + 1), stage(tile + 1) + kBytesA);
    core.template multiply<1>();
  }
  cp_async_wait<0>();
  __syncthreads();  // SAFETY: the epilogue reuses the stages as its staging buffer.
}
