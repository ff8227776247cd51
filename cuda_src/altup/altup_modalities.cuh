// The router of alternating updates, m = tanh(router norm(x) / N), shared by prediction and
// correction.
//
// A block holds one token. Each thread sums its features' squares and their products with the rows
// of the router at once: the norm's scale is a factor of all products.
#pragma once

#include "common/pdl.cuh"
#include "common/row_block.cuh"

constexpr int kMaxStreams = 4;

// Returns m in every thread, for the row x (N,). All threads of the block must call it.
template <int kWidth>
__device__ __forceinline__ Vec<float, kMaxStreams> modalities(const scalar_t* x,
                                                              const scalar_t* router_norm,
                                                              const scalar_t* router, int n,
                                                              int num_streams, float eps) {
  __shared__ float smem_sums[kWarps];
  float squares = 0.0f;
  Vec<float, kMaxStreams> dots{};
  for_own_features<kWidth>(n, [&](int c) {
    const auto values = load_vec<scalar_t, kWidth>(x + c);
    const auto weights = load_vec<scalar_t, kWidth>(router_norm + c);
    float weighted[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float value = to_float(values.v[j]);
      squares = fmaf(value, value, squares);
      weighted[j] = value * to_float(weights.v[j]);
    }
#pragma unroll
    for (int s = 0; s < kMaxStreams; ++s) {
      if (s >= num_streams) break;
      const auto row = load_vec<scalar_t, kWidth>(router + static_cast<int64_t>(s) * n + c);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dots.v[s] = fmaf(weighted[j], to_float(row.v[j]), dots.v[s]);
    }
  });
  const float mean = block_sum<kWarps>(squares, smem_sums) / n;
  const float scale = 1.0f / sqrtf(mean + eps) / n;
#pragma unroll
  for (int s = 0; s < kMaxStreams; ++s) {
    if (s >= num_streams) break;
    dots.v[s] = tanhf(block_sum<kWarps>(dots.v[s], smem_sums) * scale);
  }
  return dots;
}

// Returns row `row` of coefs (C, S) times m.
__device__ __forceinline__ float coefficient(const scalar_t* coefs, int row, int num_streams,
                                             const Vec<float, kMaxStreams>& m) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kMaxStreams; ++s)
    if (s < num_streams) sum = fmaf(to_float(coefs[row * num_streams + s]), m.v[s], sum);
  return sum;
}
