// The epilogue of swapped tiles, whose sums have a row of the weight a row and a row of x a column.
//
// One m-tile at a time passes through shared memory, as rows of x; then a thread finishes four
// columns of out. The code is small: few rows leave no time to fetch instructions.
#pragma once

#include "common/named_barrier.cuh"
#include "gemm/gemm_epilogue_sm90.cuh"

// First row, in a tile, of a warp's 16 rows of the weight in its m-tile j.
__device__ __forceinline__ int swapped_row(int j, int warp_idx) {
  const int m_tile = j + (kSplitsSlabs ? 0 : warp_idx / 4 * kMmaTilesM);
  return m_tile * kMmaM + warp_idx % 4 * 16;
}

// Threads that finish an m-tile together: a warpgroup, or all if they divide the slabs.
constexpr int kFinishers = kSplitsSlabs ? kConsumerThreads : 128;

// Returns four results of a gated product, from column `col` of gate on, plus a residual `y`.
template <typename Out>
__device__ __forceinline__ Vec<Out, 4> gate_four(const Epilogue& e, int col,
                                                 const Vec<float, 4>& gate, const Vec<float, 4>& up,
                                                 Vec<Out, 4> y) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (sizeof(Out) == sizeof(scalar_t) && e.residual == nullptr) {  // as store_gated_rounded does
      const auto bias = [&](int c) {
        return e.bias != nullptr ? to_float(e.bias[e.bias_index(c)]) : 0.0f;
      };
      y.v[j] =
          from_float<Out>(gated_to_round(gate.v[j] + bias(col + j), up.v[j] + bias(col + j + 8)));
    } else {
      y.v[j] = from_float<Out>(e.gated(col + j, gate.v[j], up.v[j]) + to_float(y.v[j]));
    }
  }
  return y;
}

// Finishes the first `width` columns of an m-tile, from column `col` on, of rows from `row` on.
template <typename Out>
__device__ __forceinline__ void finish_staged(const Epilogue& e, const float* staging, int row,
                                              int col, int width, int m, int n) {
  const int count = min(kTileM, m - row) * (kMmaM / 4);
#pragma unroll 1
  for (int i = threadIdx.x % kFinishers; i < count; i += kFinishers) {
    const int r = i / (kMmaM / 4), c = i % (kMmaM / 4) * 4;
    if (c >= width || col + c >= n) continue;
    const float* at = staging + r * kSwappedPitch + c;
    Vec<float, 4> sums[1] = {load_vec<float, 4>(at)};
    Vec<Out, 4> residual[1] = {};
    if (!e.is_gated()) {
      if (e.residual != nullptr) residual[0] = e.load_residual<Out>(row + r, col + c, n);
      finish<Out, 1>(e, sums, residual, row + r, 1, col + c, m, n);
    } else if (c % 16 < 8) {
      const int out_col = Epilogue::gated_column(col + c);
      if (e.residual != nullptr) residual[0] = e.load_residual<Out>(row + r, out_col, n / 2);
      const Vec<float, 4> up = load_vec<float, 4>(at + 8);
      e.store<Out>(row + r, out_col, n / 2, gate_four<Out>(e, col + c, sums[0], up, residual[0]));
    }
  }
}

// Stores a swapped tile, one m-tile at a time through shared memory.
__device__ __forceinline__ void store_swapped(const Epilogue& e,
                                              const float (&acc)[kMmaTilesM][kWarpgroupCols / 2],
                                              unsigned char* smem, int2 tile, int warpgroup, int m,
                                              int n) {
  const int place = kSplitsSlabs ? 0 : warpgroup, lane_idx = threadIdx.x % 32;
  float* staging = reinterpret_cast<float*>(smem + place * kSwappedStaging);
  float* own =
      staging + lane_idx % 4 * 2 * kSwappedPitch + threadIdx.x % 128 / 32 * 16 + lane_idx / 4;
  // The place of the thread's sum i: a row of x, and in it a row of the weight.
  const auto at = [&](int i) -> float& {
    return own[(i / 4 * 8 + i % 2) * kSwappedPitch + i / 2 % 2 * 8];
  };
  const auto sync = [&] { named_barrier_sync<kFinishers>(1 + place); };
#pragma unroll 1
  for (int j = 0; j < kMmaTilesM; ++j) {
    sync();  // SAFETY: threads may still be finishing what was staged before
    if constexpr (kSplitsSlabs) {
      if (warpgroup == 1) {
#pragma unroll
        for (int i = 0; i < kTileM / 2; ++i) at(i) = acc[0][i];
      }
      sync();
      if (warpgroup == 0) {
#pragma unroll
        for (int i = 0; i < kTileM / 2; ++i) at(i) += acc[0][i];
      }
    } else {
#pragma unroll
      for (int jj = 0; jj < kMmaTilesM; ++jj) {
        if (jj != j) continue;  // registers cannot be indexed
#pragma unroll
        for (int i = 0; i < kTileM / 2; ++i) at(i) = acc[jj][i];
      }
    }
    sync();
    const int within = (place * kMmaTilesM + j) * kMmaM;
    if (e.is_float)
      finish_staged<float>(e, staging, tile.x, tile.y + within, kTileN - within, m, n);
    else
      finish_staged<scalar_t>(e, staging, tile.x, tile.y + within, kTileN - within, m, n);
  }
}
