// RMSNorm fused with the preceding residual add.
//
//   h = x_scale * x + residual           (rounded to scalar_t; h = x without a residual)
//   y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset)
//
// With CENTRED=1 it is LayerNorm: y uses h - mean(h) in place of h, and adds a bias.
//
// Arguments: RmsnormParams, below.
//
// Numerics: sums and products in float; y is rounded once, after the weight. x_scale * x + residual
// is not contracted to an FMA, so h matches the mirror bit for bit.
// Parallelisation: 1 to 16 warps per row, chosen by N alone, so a row's sum does not depend on the
// number of rows. A thread keeps two or four vectors of the row in registers: the row is read once,
// with all loads in flight together. Longer rows, and rows not aligned to 16 bytes, are read twice,
// by one warp or eight; a thread re-reads only what it has read or written itself, so the second
// pass hits L1 and the op may run in place.
// Mirror: engine/reference/rmsnorm.py
#include "common/pdl.cuh"
#include "common/rmsnorm_row.cuh"

struct RmsnormParams {
  const scalar_t* x;         // (A, B, N); row (a, b) starts at a * x_stride_a + b * x_stride_b
  const scalar_t* residual;  // (A, B, N) contiguous, or null
  const scalar_t* weight;    // (N,)
  const scalar_t* bias;      // (N,) or null; read if CENTRED
  scalar_t* out;             // (A, B, N), strides like x's; may be x
  scalar_t* residual_out;    // (A, B, N) h, contiguous; may be residual; null without a residual
  int64_t num_rows;          // A * B
  int n, num_b;
  int64_t x_stride_a, x_stride_b, out_stride_a, out_stride_b;  // elements
  float eps, weight_offset, x_scale;
  int is_late;  // 1: trigger the next kernel after pdl_wait; 0: at once
};

template <int kWarpsPerRow, int kVectors>
__device__ __forceinline__ void rmsnorm_stored_row(const Row& row, float* smem_sums) {
  const auto store = [&](int, int i, const Vec<scalar_t, kVec>& y) { store_vec(row.out + i, y); };
  rmsnorm_register_row<kWarpsPerRow, kVectors>(row, smem_sums, store);
}

// Normalises a row of any length, reading it twice.
template <int kWarpsPerRow, int kWidth>
__device__ __forceinline__ void rmsnorm_long_row(const Row& row, float* smem_sums) {
  using V = Vec<scalar_t, kWidth>;
  constexpr int kStep = kWarpsPerRow * kWarpSize * kWidth;
  const int begin = (threadIdx.x % (kWarpsPerRow * kWarpSize)) * kWidth;
  float sum = 0.0f;
  for (int i = begin; i < row.n; i += kStep) {
    V h = load_vec<scalar_t, kWidth>(row.x + i);
    if (row.residual != nullptr) {
      const V r = load_vec<scalar_t, kWidth>(row.residual + i);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        h.v[j] = scaled_sum(h.v[j], row.x_scale, r.v[j]);
      }
      store_vec(row.residual_out + i, h);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += first_term(to_float(h.v[j]));
  }
  sum = block_sum<kWarpsPerRow>(sum, smem_sums);
  const scalar_t* source = row.residual != nullptr ? row.residual_out : row.x;
  const float mean = kIsCentred ? sum / row.n : 0.0f;
  if (kIsCentred) {
    sum = 0.0f;
    for (int i = begin; i < row.n; i += kStep) {
      const V h = load_vec<scalar_t, kWidth>(source + i);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += squared(to_float(h.v[j]) - mean);
    }
    sum = block_sum<kWarpsPerRow>(sum, smem_sums);
  }
  const float scale = 1.0f / sqrtf(sum / row.n + row.eps);

  for (int i = begin; i < row.n; i += kStep) {
    V h = load_vec<scalar_t, kWidth>(source + i);
    const V w = load_vec<scalar_t, kWidth>(row.weight + i);
    V bias = {};
    if (kIsCentred && row.bias != nullptr) bias = load_vec<scalar_t, kWidth>(row.bias + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float factor = to_float(w.v[j]) + row.weight_offset;
      h.v[j] = normalised(h.v[j], mean, scale, factor, bias.v[j]);
    }
    store_vec(row.out + i, h);
  }
}

// SAFETY: a warp without a row exits as a whole, and a row of several warps has a block to itself,
// so no barrier waits for an exited thread.
template <int kThreads, int kWarpsPerRow, auto kRowFunction>
__device__ __forceinline__ void rmsnorm(const RmsnormParams& p) {
  if (p.is_late == 0) pdl_trigger();
  pdl_wait();
  if (p.is_late != 0) pdl_trigger();
  __shared__ float smem_sums[kThreads / kWarpSize];
  constexpr int kRowThreads = kWarpsPerRow * kWarpSize;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  if (row >= p.num_rows) return;
  const Rows x_rows{p.x_stride_a, p.x_stride_b, p.num_b};
  const Rows out_rows{p.out_stride_a, p.out_stride_b, p.num_b};
  const bool has_residual = p.residual != nullptr;
  kRowFunction(
      Row{p.x + x_rows.offset(row), has_residual ? p.residual + row * p.n : nullptr, p.weight,
          p.bias, p.out + out_rows.offset(row), has_residual ? p.residual_out + row * p.n : nullptr,
          p.n, p.eps, p.weight_offset, p.x_scale},
      smem_sums);
}

#define ENGINE_RMSNORM(name, threads, warps_per_row, row_function)      \
  extern "C" __global__ void __launch_bounds__(threads, 1024 / threads) \
      name(const __grid_constant__ RmsnormParams p) {                   \
    rmsnorm<threads, warps_per_row, row_function>(p);                   \
  }

ENGINE_RMSNORM(rmsnorm_registers_1, 128, 1, (rmsnorm_stored_row<1, 2>))
ENGINE_RMSNORM(rmsnorm_registers_2, 64, 2, (rmsnorm_stored_row<2, 2>))
ENGINE_RMSNORM(rmsnorm_registers_4, 128, 4, (rmsnorm_stored_row<4, 2>))
ENGINE_RMSNORM(rmsnorm_registers_8, 256, 8, (rmsnorm_stored_row<8, 2>))
ENGINE_RMSNORM(rmsnorm_registers_16, 256, 8, (rmsnorm_stored_row<8, 4>))
ENGINE_RMSNORM(rmsnorm_registers_32, 512, 16, (rmsnorm_stored_row<16, 4>))
ENGINE_RMSNORM(rmsnorm_long_vector, 256, 8, (rmsnorm_long_row<8, kVec>))
ENGINE_RMSNORM(rmsnorm_warp_scalar, 128, 1, (rmsnorm_long_row<1, 1>))
ENGINE_RMSNORM(rmsnorm_long_scalar, 256, 8, (rmsnorm_long_row<8, 1>))
