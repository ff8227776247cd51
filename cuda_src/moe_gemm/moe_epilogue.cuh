// Epilogue of moe_gemm.cu's tiles: bias, activation, pair weight, and the store to the pair's row.
#pragma once

#include "moe_gemm/moe_rows.cuh"
#include "common/tile_epilogue.cuh"

struct MoeTileEpilogue {
  const scalar_t* bias;       // (R,) the expert's bias, or null
  const float* pair_weights;  // null: 1
  const int* order;
  scalar_t* out;
  int num_pairs, columns;  // number of pairs; columns of out
  bool scatters;           // false: rows of out are sorted by expert
  bool is_vector;
  MoeGate gate;

  __device__ __forceinline__ MoeTileEpilogue(const MoeGemmParams& p, int expert)
      : bias(p.bias == nullptr ? nullptr : p.bias + static_cast<int64_t>(expert) * p.num_rows),
        pair_weights(p.pair_weights),
        order(p.order),
        out(p.out),
        num_pairs(p.num_pairs),
        columns(p.activation != kNone ? p.num_rows / 2 : p.num_rows),
        scatters(p.scatters != 0),
        is_vector(p.is_vector != 0),
        gate{p.activation, p.alpha, p.limit} {}

  // `sum` is the sum of matrix row `column`; if gated, of that gate row, and `up` points to up's
  // sum.
  __device__ __forceinline__ float finish(int column, float sum, const float* up) const {
    if (bias != nullptr) sum += to_float(bias[column]);
    if (!gate.is_gated()) return sum;
    return gate(sum, bias != nullptr ? *up + to_float(bias[columns + column]) : *up);
  }
};

// Overload of store_slice in tile_epilogue.cuh, called by MmaCore and SimtCore; rows of the slice
// are indices in the sorted order. A thread reads other threads' groups, which are not modified.
template <typename S>
__device__ __forceinline__ void store_slice(const MoeTileEpilogue& e, const S& s) {
#pragma unroll 1
  for (int group = 0; group < S::kGroups; ++group) {
    const int place = s.row0 + s.row(group), col = s.col0 + s.col(group);
    const bool is_up = e.gate.is_gated() && col % 16 >= 8;
    const int column = e.gate.is_gated() ? Epilogue::gated_column(col) : col;
    if (place >= s.m || is_up || column >= e.columns) continue;
    int row = place;
    float scale = 1.0f;
    if (e.scatters) {
      row = e.order[place];
      if (row < 0 || row >= e.num_pairs) continue;
      if (e.pair_weights != nullptr) scale = e.pair_weights[row];
    }
    const float* sums = s.at(group);
    scalar_t* out = e.out + static_cast<int64_t>(row) * e.columns + column;
    Vec<scalar_t, 4> y = {};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (column + j < e.columns)
        y.v[j] = from_float<scalar_t>(e.finish(column + j, sums[j], sums + j + 8) * scale);
    if (e.is_vector) {
      store_vec(out, y);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (column + j < e.columns) out[j] = y.v[j];
    }
  }
}
