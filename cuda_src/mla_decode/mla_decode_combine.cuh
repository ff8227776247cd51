// Second kernel of mla_decode: sums the partials of sequences whose keys were split.
//
// A partial holds 512 floats per row, as much as many keys: so all CTAs share this work, instead of
// the last CTA of each sequence. Partials are summed in key order, in an order of additions that
// depends on their number alone.
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
  int rows_per_cta;
};

constexpr int kCombineThreads = 256;
constexpr int kMaxSplits = 1024;
constexpr int kCombineLanes = kLatent / 4;  // threads that share one partial's row
constexpr int kCombineParts = kCombineThreads / kCombineLanes;
static_assert(kCombineThreads % kCombineLanes == 0, "a part of the partials per kCombineLanes");

// Weights 2^(base - largest base) of a row's partials to smem_weights; returns {largest base, sum}.
// All threads call it.
__device__ __forceinline__ float2 combine_weights(const MlaCombineParams& p, const SplitList& list,
                                                  int row, float* smem_weights, float* smem_sums) {
  float base = -kInf;
  const auto stats = [&](int split) {
    const int64_t at = static_cast<int64_t>(list.partial(split)) * p.num_rows + row;
    return load_vec<float, 2>(p.partial_stats + at * 2);
  };
  // Each warp finds the maximum itself: the statistics are few.
  for (int i = threadIdx.x % kWarpSize; i < list.count; i += kWarpSize)
    base = fmaxf(base, stats(i).v[0]);
  base = warp_max(base);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < list.count; i += kCombineThreads) {
    const Vec<float, 2> s = stats(i);
    const float weight = exp2_approx(s.v[0] - finite_or_zero(base));
    smem_weights[i] = weight;
    sum += s.v[1] * weight;
  }
  return make_float2(base, block_sum<kCombineThreads / kWarpSize>(sum, smem_sums));
}

__device__ __forceinline__ void write_four(const MlaCombineParams& p, scalar_t* row, int column,
                                           const float4& x) {
  const Vec<scalar_t, 4> y{from_float<scalar_t>(x.x), from_float<scalar_t>(x.y),
                           from_float<scalar_t>(x.z), from_float<scalar_t>(x.w)};
  if (p.is_vector) {
    if (column < p.latent) store_vec(row + column, y);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < p.latent) row[column + i] = y.v[i];
  }
}

__device__ __forceinline__ void combine_row(const MlaCombineParams& p, const SplitList& list,
                                            const RowOutput& output, int row) {
  __shared__ float smem_weights[kMaxSplits], smem_sums[kCombineThreads / kWarpSize];
  __shared__ float4 smem_parts[kCombineThreads];
  const float2 total = combine_weights(p, list, row, smem_weights, smem_sums);
  __syncthreads();
  const int lane = threadIdx.x % kCombineLanes;
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int i = threadIdx.x / kCombineLanes; i < list.count; i += kCombineParts) {
    const int64_t at = static_cast<int64_t>(list.partial(i)) * p.num_rows + row;
    const float4 x = *reinterpret_cast<const float4*>(p.partial_o + at * kLatent + lane * 4);
    const float w = smem_weights[i];
    o.x = fmaf(x.x, w, o.x), o.y = fmaf(x.y, w, o.y);
    o.z = fmaf(x.z, w, o.z), o.w = fmaf(x.w, w, o.w);
  }
  smem_parts[threadIdx.x] = o;
  __syncthreads();
  if (threadIdx.x < kCombineLanes) {
    for (int part = 1; part < kCombineParts; ++part) {
      const float4 x = smem_parts[part * kCombineLanes + lane];
      o.x += x.x, o.y += x.y, o.z += x.z, o.w += x.w;
    }
    const float factor = inverse_sum(total.y);
    write_four(p, output.at(row), lane * 4,
               {o.x * factor, o.y * factor, o.z * factor, o.w * factor});
  }
  if (threadIdx.x == 0) output.write_lse(row, total.x, total.y);
  __syncthreads();  // the next row reuses shared memory
}

extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)
    mla_decode_combine(const __grid_constant__ MlaCombineParams p) {
  pdl_trigger();
  pdl_wait();
  const int b = blockIdx.x, begin = blockIdx.y * p.rows_per_cta;
  const SplitList list = SplitList::of(p.splits[b]);
  if (list.count < 2) return;
  const int64_t lse_begin = static_cast<int64_t>(b) * p.num_rows;
  const RowOutput output{p.out + b * p.out_stride_b, p.lse == nullptr ? nullptr : p.lse + lse_begin,
                         p.out_stride_t, p.out_stride_h, p.num_heads};
  for (int row = begin; row < min(begin + p.rows_per_cta, p.num_rows); ++row)
    combine_row(p, list, output, row);
}
