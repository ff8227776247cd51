// Matrix product with a fused epilogue.
//
//   out = activation(x weight^T + bias) + residual
//
//   x         (M, K) scalar_t           rows x_stride elements apart
//   weight    (N, K) scalar_t           contiguous
//   bias      (N,)   scalar_t           or null
//   residual  (M, N) scalar_t or float  as out; rows residual_stride apart; or null; may be out
//   out       (M, N) scalar_t or float  rows out_stride apart
//
// With activation "silu_and_mul" the weight's rows, and bias, are gate and up in turn, eight of each
// (N a multiple of 16): out is silu(gate) * up + residual, (M, N / 2), as residual is.
//
//   partials  (splits, M, N) float      scratch, or null when k is not split
//
// Numerics: products of 16-bit values on tensor cores (mma.sync), of float32 on CUDA cores without
// TF32; sums, bias, activation and residual in float, one rounding at the end. Every order of
// summation is fixed: results are the same from run to run. They do not depend on M within the
// skinny kernels, nor within the others while k is split alike (choose_config splits by M).
// Parallelisation: a block makes one tile of out (common/gemm_mma.cuh, common/gemm_simt.cuh); where
// too few tiles would fill the chip it makes a share of k of one, and gemm_reduce adds the shares.
// With few rows, common/gemm_stream.cuh streams the weight through shared memory, and where that is
// too small or values are float32, common/gemm_skinny.cuh through registers.
// Mirror: engine/reference/gemm.py
#include "gemm/entries.cuh"

ENGINE_GEMM_ENTRIES(gemm, false)
ENGINE_SKINNY_ENTRIES(gemm, false)

// Adds the splits' partial sums in their order and applies the epilogue; a thread an element.
extern "C" __global__ void __launch_bounds__(256)
    gemm_reduce(const float* partials, int num_splits, const scalar_t* bias, const void* residual,
                int64_t residual_stride, void* out, int64_t out_stride, int m, int n,
                int activation, int is_float) {
  const int64_t size = static_cast<int64_t>(m) * n;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  const int64_t row = i / n;
  const Epilogue epilogue{bias,       residual,   out,           residual_stride,
                          out_stride, activation, is_float != 0, false};
  epilogue.store_one(row, static_cast<int>(i % n), [&](int column) {
    float sum = 0.0f;
    for (int split = 0; split < num_splits; ++split)
      sum += partials[split * size + row * n + column];
    return sum;
  });
}
