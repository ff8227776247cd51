// The epilogue of swapped tiles. A row of their sums belongs to a row of the weight, a column to a
// row of x.
//
// A warpgroup's sums pass through shared memory, where they become rows of x. Each thread then
// finishes four columns of out at a time, in one short loop: with few rows, a longer epilogue slows
// a model's step, although the kernel alone is as fast.
#pragma once

#include "common/named_barrier.cuh"
#include "gemm/gemm_epilogue_sm90.cuh"

// First row, in a tile, of a warp's 16 rows of the weight.
__device__ __forceinline__ int swapped_row(int warp_idx) {
  return (kSplitsSlabs ? 0 : warp_idx / 4 * kMmaM) + warp_idx % 4 * 16;
}

// Threads that finish an m-tile together: a warpgroup, or two that divide its slabs.
constexpr int kFinishers = kSplitsSlabs ? kConsumerThreads : 128;

// Returns four results of a gated product, whose gate begins at column `col`. `y`: the residual, if
// there is one.
template <typename Out>
__device__ __forceinline__ Vec<Out, 4> gate_four(const Epilogue& e, int col,
                                                 const Vec<float, 4>& gate, const Vec<float, 4>& up,
                                                 Vec<Out, 4> y) {
  const auto biased = [&](float sum, int c) {
    return e.bias != nullptr ? sum + to_float(e.bias[e.bias_index(c)]) : sum;
  };
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int c = col + j;
    if (sizeof(Out) == sizeof(scalar_t) && e.residual == nullptr) {  // as store_gated_rounded does
      y.v[j] = from_float<Out>(gated_to_round(biased(gate.v[j], c), biased(up.v[j], c + 8)));
      continue;
    }
    float product = e.addend<Out>(e.gated(c, gate.v[j], up.v[j]));
    // Two roundings, as in store_gated, not one of a contracted operation.
    if (e.residual != nullptr) product = __fadd_rn(product, to_float(y.v[j]));
    y.v[j] = from_float<Out>(product);
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

// Stores this warpgroup's m-tile, or the one that it shares with the other. `tile`: first row and
// column of the tile.
__device__ __forceinline__ void store_swapped(const Epilogue& e,
                                              const float (&acc)[kWarpgroupCols / 2],
                                              unsigned char* smem, int2 tile, int warpgroup, int m,
                                              int n) {
  const int m_tile = kSplitsSlabs ? 0 : warpgroup, lane_idx = threadIdx.x % 32;
  float* staging = reinterpret_cast<float*>(smem + m_tile * kSwappedStaging);
  float* own =
      staging + lane_idx % 4 * 2 * kSwappedPitch + threadIdx.x % 128 / 32 * 16 + lane_idx / 4;
  // Returns the place of the thread's sum i, in [row of x][row of the weight].
  const auto at = [&](int i) -> float& {
    return own[(i / 4 * 8 + i % 2) * kSwappedPitch + i / 2 % 2 * 8];
  };
  const auto sync = [&] { named_barrier_sync<kFinishers>(1 + m_tile); };
  sync();  // SAFETY: threads may still be finishing what was staged before
  if (!kSplitsSlabs || warpgroup == 1) {
#pragma unroll
    for (int i = 0; i < kTileM / 2; ++i) at(i) = acc[i];
  }
  sync();
  if constexpr (kSplitsSlabs) {
    if (warpgroup == 0) {
#pragma unroll
      for (int i = 0; i < kTileM / 2; ++i) at(i) += acc[i];
    }
    sync();
  }
  const int within = m_tile * kMmaM;
  if (e.is_float)
    finish_staged<float>(e, staging, tile.x, tile.y + within, kTileN - within, m, n);
  else
    finish_staged<scalar_t>(e, staging, tile.x, tile.y + within, kTileN - within, m, n);
}
