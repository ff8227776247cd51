// RMSNorm fused into a GEMM.
//
//   h   = x / sqrt(mean(x^2) + eps) * (norm_weight + weight_offset)     (rounded to scalar_t)
//   out = activation(h weight^T + bias)
//
// Arguments: GemmParams and SkinnyParams in gemm/gemm_problem.cuh; for rmsnorm_row_scales, below.
//
// Numerics: the norm in float; h is rounded before the product, so the result equals that of the
// two separate ops up to summation order. Product: see gemm.cu.
// Parallelisation: gemm.cu's kernels compute h from x on its way to shared memory or registers. The
// skinny kernels compute 1 / rms in every block while their first weights are in flight, so one
// launch suffices. With more rows, each block in a row of tiles would have to read its rows of x a
// second time, so a separate launch of rmsnorm_row_scales computes 1 / rms once.
// Mirror: engine/reference/rmsnorm_gemm.py
#include "gemm/gemm_entries.cuh"

ENGINE_GEMM_ENTRIES(rmsnorm_gemm, true)
ENGINE_SKINNY_ENTRIES(rmsnorm_gemm, true)

// row_scales[m] = 1 / sqrt(mean(x[m]^2) + eps), one warp per row; with is_vector, x is read 16
// bytes at a time.
extern "C" __global__ void __launch_bounds__(256)
    rmsnorm_row_scales(const scalar_t* x, int64_t x_stride, float* row_scales, int m, int k,
                       float eps, int is_vector) {
  constexpr int kRowsPerBlock = 256 / kWarpSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarpSize;
  const int lane_idx = threadIdx.x % kWarpSize;
  if (row >= m) return;  // SAFETY: whole warps return, and there is no block barrier.
  const scalar_t* p = x + row * x_stride;
  float sum = 0.0f;
  if (is_vector) {
    for (int i = lane_idx * kVec; i < k; i += kWarpSize * kVec) {
      const Vec<scalar_t, kVec> v = load_vec<scalar_t, kVec>(p + i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum += to_float(v.v[j]) * to_float(v.v[j]);
    }
  } else {
    for (int i = lane_idx; i < k; i += kWarpSize) sum += to_float(p[i]) * to_float(p[i]);
  }
  sum = warp_sum(sum);
  if (lane_idx == 0) row_scales[row] = 1.0f / sqrtf(sum / k + eps);
}
