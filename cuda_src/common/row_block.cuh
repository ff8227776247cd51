// Rows of features, one block each: loops over a row, and sums over it.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"

// Threads per block, and its warps.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// Calls f(c) for the first of every kWidth features that the thread owns.
template <int kWidth, typename F>
__device__ __forceinline__ void for_own_features(int n, F f) {
#pragma unroll 1
  for (int c = threadIdx.x * kWidth; c < n; c += kThreads * kWidth) f(c);
}

// The sum of f(x) over the n features of a row, in every thread; `smem` holds kWarps floats. All
// threads of the block must call it.
template <int kWidth, typename F>
__device__ __forceinline__ float row_sum(const scalar_t* row, int n, float* smem, F f) {
  float sum = 0.0f;
  for_own_features<kWidth>(n, [&](int c) {
    const auto values = load_vec<scalar_t, kWidth>(row + c);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += f(to_float(values.v[j]));
  });
  return block_sum<kWarps>(sum, smem);
}

// Stores f(x) for the n features of `row` to `out`, which may be `row`.
template <int kWidth, typename F>
__device__ __forceinline__ void map_row(const scalar_t* row, scalar_t* out, int n, F f) {
  for_own_features<kWidth>(n, [&](int c) {
    auto values = load_vec<scalar_t, kWidth>(row + c);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values.v[j] = from_float<scalar_t>(f(to_float(values.v[j])));
    store_vec(out + c, values);
  });
}
