// Second kernel of mla_decode: sums the partials of sequences whose keys were split.
//
// A partial holds 512 floats per row, as much as many keys: so all CTAs share this work, instead of
// the last CTA of each sequence. With few rows a CTA combines each, with many a warp; both add in
// the same order, which depends on the number of partials alone: kCombineParts sums, each of every
// kCombineParts-th partial in key order, and then these.
#pragma once

#include "common/pdl.cuh"
#include "mla_decode/mla_decode_problem.cuh"

struct MlaCombineParams {
  const int4* splits;          // (B,) SplitList
  const float* partial_o;      // (partials, rows, kLatent) sums of P V relative to 2^base
  const float* partial_stats;  // (partials, rows, 2) base (log2) and sum of P
  scalar_t* out;               // (B, Q, H, L)
  float* lse;                  // (B, Q, H) contiguous, or null
  int64_t out_stride_b, out_stride_t, out_stride_h;
  int num_rows, num_heads;  // rows per sequence, Q * H; H
  int latent;               // L
  int is_vector;            // rows of out are multiples of 4 values, so aligned
  int rows_per_cta;         // 1, or a row per warp
};

constexpr int kCombineThreads = 256;
constexpr int kRowThreads = kLatent / 4;  // threads with four columns each
constexpr int kCombineParts = kCombineThreads / kRowThreads;
static_assert(kCombineThreads % kRowThreads == 0, "a CTA's threads cover kCombineParts partials");

// The partials of a row.
struct PartialRows {
  const MlaCombineParams& p;
  SplitList list;
  int row;

  __device__ __forceinline__ int64_t index(int split) const {
    return static_cast<int64_t>(list.partial(split)) * p.num_rows + row;
  }
  __device__ __forceinline__ Vec<float, 2> stats(int split) const {
    return load_vec<float, 2>(p.partial_stats + index(split) * 2);
  }
  // Returns {largest base, sum of P relative to it}. A warp calls it.
  __device__ __forceinline__ float2 total() const {
    const int lane = threadIdx.x % kWarpSize;
    float base = -kInf, sum = 0.0f;
    for (int i = lane; i < list.count; i += kWarpSize) base = fmaxf(base, stats(i).v[0]);
    base = warp_max(base);
    for (int i = lane; i < list.count; i += kWarpSize) {
      const Vec<float, 2> s = stats(i);
      sum = fmaf(s.v[1], exp2_approx(s.v[0] - finite_or_zero(base)), sum);
    }
    return make_float2(base, warp_sum(sum));
  }
  // o += a partial's columns, relative to 2^base; kStride columns between two words of four.
  template <int kWords, int kStride>
  __device__ __forceinline__ void add(float4 (&o)[kWords], int split, int column,
                                      float base) const {
    const float weight = exp2_approx(stats(split).v[0] - finite_or_zero(base));
    const float* const from = p.partial_o + index(split) * kLatent + column;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const float4 x = *reinterpret_cast<const float4*>(from + j * kStride);
      o[j].x = fmaf(x.x, weight, o[j].x), o[j].y = fmaf(x.y, weight, o[j].y);
      o[j].z = fmaf(x.z, weight, o[j].z), o[j].w = fmaf(x.w, weight, o[j].w);
    }
  }
};

__device__ __forceinline__ void add(float4& x, const float4& y) {
  x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
}

__device__ __forceinline__ void write_four(const MlaCombineParams& p, scalar_t* row, int column,
                                           const float4& x, float factor) {
  const Vec<scalar_t, 4> y{from_float<scalar_t>(x.x * factor), from_float<scalar_t>(x.y * factor),
                           from_float<scalar_t>(x.z * factor), from_float<scalar_t>(x.w * factor)};
  if (p.is_vector) {
    if (column < p.latent) store_vec(row + column, y);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < p.latent) row[column + i] = y.v[i];
  }
}

// A warp combines a row.
__device__ __forceinline__ void combine_in_warp(const PartialRows& rows, const RowOutput& output) {
  constexpr int kStride = 4 * kWarpSize, kWords = kLatent / kStride;
  const int column = threadIdx.x % kWarpSize * 4;
  const float2 total = rows.total();
  float4 o[kCombineParts][kWords] = {};
#pragma unroll 1
  for (int i = 0; i < rows.list.count; i += kCombineParts)
#pragma unroll
    for (int part = 0; part < kCombineParts; ++part)
      if (i + part < rows.list.count) rows.add<kWords, kStride>(o[part], i + part, column, total.x);
  const float factor = inverse_sum(total.y);
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
#pragma unroll
    for (int part = 1; part < kCombineParts; ++part) add(o[0][j], o[part][j]);
    write_four(rows.p, output.at(rows.row), column + j * kStride, o[0][j], factor);
  }
  if (column == 0) output.write_lse(rows.row, total.x, total.y);
}

// The CTA combines a row.
__device__ __forceinline__ void combine_in_cta(const PartialRows& rows, const RowOutput& output) {
  __shared__ float4 smem_parts[kCombineThreads];
  const int thread = threadIdx.x % kRowThreads;
  const float2 total = rows.total();
  float4 o[1] = {};
#pragma unroll 8
  for (int i = threadIdx.x / kRowThreads; i < rows.list.count; i += kCombineParts)
    rows.add<1, 0>(o, i, thread * 4, total.x);
  smem_parts[threadIdx.x] = o[0];
  __syncthreads();
  if (threadIdx.x < kRowThreads) {
#pragma unroll
    for (int part = 1; part < kCombineParts; ++part)
      add(o[0], smem_parts[part * kRowThreads + thread]);
    write_four(rows.p, output.at(rows.row), thread * 4, o[0], inverse_sum(total.y));
  }
  if (threadIdx.x == 0) output.write_lse(rows.row, total.x, total.y);
}

extern "C" __global__ void __launch_bounds__(kCombineThreads, 3)
    mla_decode_combine(const __grid_constant__ MlaCombineParams p) {
  pdl_trigger();
  pdl_wait();
  const int b = blockIdx.x, begin = blockIdx.y * p.rows_per_cta;
  const SplitList list = SplitList::of(p.splits[b]);
  if (list.count < 2) return;
  const int64_t lse_begin = static_cast<int64_t>(b) * p.num_rows;
  const RowOutput output{p.out + b * p.out_stride_b, p.lse == nullptr ? nullptr : p.lse + lse_begin,
                         p.out_stride_t, p.out_stride_h, p.num_heads};
  if (p.rows_per_cta == 1) {
    combine_in_cta(PartialRows{p, list, begin}, output);
  } else {
    const int row = begin + threadIdx.x / kWarpSize;
    if (row < p.num_rows) combine_in_warp(PartialRows{p, list, row}, output);
  }
}
