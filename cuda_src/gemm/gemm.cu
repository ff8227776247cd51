// GEMM with a fused epilogue.
//
//   out = activation(x weight^T + bias) + residual
//
// With activation "silu_and_mul" the rows of the weight, and the bias, alternate between gate and
// up in groups of eight (N a multiple of 16): out = silu(gate) * up + residual, and out and
// residual have shape (M, N / 2). Arguments: GemmParams and SkinnyParams in gemm/gemm_problem.cuh;
// for gemm_reduce, below.
//
// Numerics: 16-bit values are multiplied on tensor cores (mma.sync), float32 values on CUDA cores
// without TF32; sums, bias, activation and residual in float, one rounding at the end. Every
// summation order is fixed, so results are reproducible. A row's bits do not depend on M within the
// skinny kernels, nor within the tiled kernels for the same split of k (choose_config splits by M).
// Parallelisation: a block computes one tile of out (gemm_tile.cuh). If the tiles are too few to
// fill the GPU, several blocks split a tile's k, and gemm_reduce adds their partials. With few
// rows, reading the weight dominates: skinny_ring.cuh streams it through rings of shared memory,
// gemv.cuh keeps it in registers for one row, resident_rows.cuh for up to eight, and
// skinny_direct.cuh loads it straight into registers if shared memory is too small or values are
// float32.
// Mirror: engine/reference/gemm.py
#include "gemm/gemm_entries.cuh"

ENGINE_GEMM_ENTRIES(gemm, false)
ENGINE_SKINNY_ENTRIES(gemm, false)
ENGINE_RESIDENT_ENTRY(gemm)

// Adds the splits' partials (num_splits, m, n) in order and applies the epilogue, one thread per
// element. Other arguments: see GemmParams.
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
