// RMSNorm, with the residual add fused in front of it.
//
//   h = x + residual                     (rounded to scalar_t; h = x without a residual)
//   y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset)
//
//   x            (A, B, N) scalar_t   row (a, b) starts at a * x_stride_a + b * x_stride_b
//   residual     (A, B, N) scalar_t   contiguous, or null
//   weight       (N,)      scalar_t
//   out          (A, B, N) scalar_t   strides like x's; may be x
//   residual_out (A, B, N) scalar_t   h, contiguous; may be residual; null without a residual
//
// Numerics: sums and products in float; y is rounded once, after the weight.
// Parallelisation: one row per warp for short rows (four rows a block), else one row per block of
// eight warps. Each thread re-reads in the second pass only what it read (or wrote) in the first, so
// the second pass comes from L1 and writing in place is safe.
// Mirror: engine/reference/rmsnorm.py
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kRowsPerBlockShort = kThreads / kWarpSize;

struct Rows {
  int64_t stride_a, stride_b;
  int num_b;
  __device__ __forceinline__ int64_t offset(int64_t row) const {
    return (row / num_b) * stride_a + (row % num_b) * stride_b;
  }
};

template <int kWarpsPerRow, int kWidth>
__device__ void rmsnorm_row(const scalar_t* __restrict__ x, const scalar_t* residual,
                            const scalar_t* __restrict__ weight, scalar_t* out,
                            scalar_t* residual_out, int n, float eps, float weight_offset) {
  using V = Vec<scalar_t, kWidth>;
  __shared__ float smem_sums[kThreads / kWarpSize];
  constexpr int kStep = kWarpsPerRow * kWarpSize * kWidth;
  const int begin = (threadIdx.x % (kWarpsPerRow * kWarpSize)) * kWidth;

  float sum_of_squares = 0.0f;
  for (int i = begin; i < n; i += kStep) {
    V h = load_vec<scalar_t, kWidth>(x + i);
    if (residual != nullptr) {
      const V r = load_vec<scalar_t, kWidth>(residual + i);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) h.v[j] = from_float<scalar_t>(to_float(h.v[j]) + to_float(r.v[j]));
      store_vec(residual_out + i, h);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum_of_squares += to_float(h.v[j]) * to_float(h.v[j]);
  }
  sum_of_squares = block_sum<kWarpsPerRow>(sum_of_squares, smem_sums);
  const float scale = 1.0f / sqrtf(sum_of_squares / n + eps);

  const scalar_t* source = residual != nullptr ? residual_out : x;
  for (int i = begin; i < n; i += kStep) {
    V h = load_vec<scalar_t, kWidth>(source + i);
    const V w = load_vec<scalar_t, kWidth>(weight + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      h.v[j] = from_float<scalar_t>(to_float(h.v[j]) * scale * (to_float(w.v[j]) + weight_offset));
    store_vec(out + i, h);
  }
}

template <int kWarpsPerRow, int kWidth>
__device__ void rmsnorm(const scalar_t* x, const scalar_t* residual, const scalar_t* weight,
                        scalar_t* out, scalar_t* residual_out, int64_t num_rows, int n, Rows x_rows,
                        Rows out_rows, float eps, float weight_offset) {
  constexpr int kRowsPerBlock = kThreads / (kWarpsPerRow * kWarpSize);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock +
                      threadIdx.x / (kWarpsPerRow * kWarpSize);
  if (row >= num_rows) return;  // SAFETY: whole warps leave; one-warp rows use no block barrier.
  const bool has_residual = residual != nullptr;
  rmsnorm_row<kWarpsPerRow, kWidth>(
      x + x_rows.offset(row), has_residual ? residual + row * n : nullptr, weight,
      out + out_rows.offset(row), has_residual ? residual_out + row * n : nullptr, n, eps,
      weight_offset);
}

#define ENGINE_RMSNORM(name, warps_per_row, width)                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, 4)                                         \
      name(const scalar_t* x, const scalar_t* residual, const scalar_t* weight, scalar_t* out,     \
           scalar_t* residual_out, int64_t num_rows, int n, int num_b, int64_t x_stride_a,         \
           int64_t x_stride_b, int64_t out_stride_a, int64_t out_stride_b, float eps,              \
           float weight_offset) {                                                                  \
    rmsnorm<warps_per_row, width>(x, residual, weight, out, residual_out, num_rows, n,             \
                                  Rows{x_stride_a, x_stride_b, num_b},                             \
                                  Rows{out_stride_a, out_stride_b, num_b}, eps, weight_offset);    \
  }

ENGINE_RMSNORM(rmsnorm_warp_vector, 1, kVec)
ENGINE_RMSNORM(rmsnorm_warp_scalar, 1, 1)
ENGINE_RMSNORM(rmsnorm_block_vector, kThreads / kWarpSize, kVec)
ENGINE_RMSNORM(rmsnorm_block_scalar, kThreads / kWarpSize, 1)
