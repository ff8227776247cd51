// Turns the warps' partial sums in shared memory into out: adds the parts of k, across the cluster
// through distributed shared memory, then applies the epilogue.
#pragma once

#include "gemm/skinny_block.cuh"

// Epilogue operands of four columns of a row of out, loaded early to hide the latency.
struct OutputOperands {
  Vec<float, 4> bias, up_bias, residual;
};

// Iterates over the columns that a thread writes: groups of four in a row of out.
template <typename Shape>
struct OutputPlace {
  int index, step, token, row, column;  // row within the tile's 16; column of out

  __device__ __forceinline__ OutputPlace(const Problem& p, const SkinnyBlock<Shape>& b)
      : index((b.rank * static_cast<int>(blockDim.y) + threadIdx.y) * kWarpSize + b.lane_idx),
        step(b.parts * kWarpSize) {  // threads of the warps that share these rows
  }
  // Returns whether this position is still inside the tile that begins at weight row `row0`.
  __device__ __forceinline__ bool is_inside(const Problem& p, int row0) {
    const bool is_gated = p.epilogue.is_gated();
    token = index >> (is_gated ? 1 : 2);
    row = is_gated ? index % 2 * 4 : index % 4 * 4;
    column = is_gated ? row0 / 2 + row : row0 + row;
    return token < p.m && row0 + row < p.n;
  }
};

// The bias may be read before the preceding kernel has ended.
template <typename Shape>
__device__ __forceinline__ void skinny_load_bias(const Problem& p, const SkinnyBlock<Shape>& b,
                                                 const OutputPlace<Shape>& place,
                                                 OutputOperands& o) {
  const Epilogue& e = p.epilogue;
  o.bias = o.up_bias = Vec<float, 4>{};
  if (e.bias == nullptr) return;
  const int gate =
      e.is_gated() && b.num_gates == 0 ? place.column / 8 * 16 + place.column % 8 : place.column;
  const int up = b.num_gates > 0 ? gate + b.num_gates : gate + 8;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (e.is_gated() || gate + j < p.n) o.bias.v[j] = to_float(e.bias[gate + j]);
    if (e.is_gated()) o.up_bias.v[j] = to_float(e.bias[up + j]);
  }
}

template <typename Out, typename Shape>
__device__ __forceinline__ void skinny_load_residual_as(const Problem& p,
                                                        const OutputPlace<Shape>& place,
                                                        OutputOperands& o) {
  const Epilogue& e = p.epilogue;
  const Vec<Out, 4> r = e.load_residual<Out>(place.token, place.column, e.out_columns(p.n));
#pragma unroll
  for (int j = 0; j < 4; ++j) o.residual.v[j] = to_float(r.v[j]);
}

template <typename Shape>
__device__ __forceinline__ void skinny_load_residual(const Problem& p,
                                                     const OutputPlace<Shape>& place,
                                                     OutputOperands& o) {
  if (p.epilogue.residual == nullptr) return;
  if (p.epilogue.is_float)
    skinny_load_residual_as<float>(p, place, o);
  else
    skinny_load_residual_as<scalar_t>(p, place, o);
}

template <typename Out>
__device__ __forceinline__ void skinny_store(const Epilogue& e, int token, int column, int n,
                                             const Vec<float, 4>& sum) {
  Vec<Out, 4> y;
#pragma unroll
  for (int j = 0; j < 4; ++j) y.v[j] = from_float<Out>(sum.v[j]);
  e.store<Out>(token, column, n, y);
}

// Sums four weight rows over all parts, in order; `from` points to the first part's sums.
template <typename Shape>
__device__ __forceinline__ Vec<float, 4> skinny_sum(const SkinnyBlock<Shape>& b,
                                                    const float* from) {
  Vec<float, 4> sum = {};
#pragma unroll 1
  for (int rank = 0; rank < b.size; ++rank)
#pragma unroll 4
    for (int part = 0; part < static_cast<int>(blockDim.y); ++part) {
      const auto x = ld_shared_cluster<4>(from + part * Shape::kSumFloats, rank, b.size);
      sum.v[0] += x.v[0], sum.v[1] += x.v[1], sum.v[2] += x.v[2], sum.v[3] += x.v[3];
    }
  return sum;
}

// Adds the parts' sums for the rows of this warp, in order, and writes this warp's share of the
// columns to out. `sums` points to the sums of the block's first warp for these rows; `early` holds
// the operands of this thread's first columns in the first tile.
template <typename Shape>
__device__ __forceinline__ void skinny_finish(const Problem& p, const SkinnyBlock<Shape>& b,
                                              int row0, const float* sums,
                                              const OutputOperands& early, bool is_first) {
  const Epilogue& e = p.epilogue;
#pragma unroll 1
  for (OutputPlace<Shape> place(p, b); place.is_inside(p, row0);
       place.index += place.step, is_first = false) {
    OutputOperands o = early;
    if (!is_first) {
      skinny_load_bias(p, b, place, o);
      skinny_load_residual(p, place, o);
    }
    const float* from = sums + place.token * Shape::kPitch + place.row;
    Vec<float, 4> y = skinny_sum(b, from);
    if (e.is_gated()) {
      const Vec<float, 4> up = skinny_sum(b, from + 8);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        y.v[j] = e.gated_result(y.v[j] + o.bias.v[j], up.v[j] + o.up_bias.v[j]);
    } else if (!e.is_bare()) {
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[j] = activate(e.activation, y.v[j] + o.bias.v[j]);
    }
    if (kSumsInParts || e.residual != nullptr) {
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[j] = e.with_residual(y.v[j], o.residual.v[j]);
    }
    const int n = e.out_columns(p.n);
    if (e.is_float)
      skinny_store<float>(e, place.token, place.column, n, y);
    else
      skinny_store<scalar_t>(e, place.token, place.column, n, y);
  }
}
