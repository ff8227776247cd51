// Permutes the columns of a matrix.
//
//   out[m, k] = x[m, permutation[k]]; 0 if permutation[k] is outside [0, N)
//
// x (M, N), rows x_stride elements apart; permutation (K,) int32; out (M, K), rows out_stride
// elements apart.
// Numerics: a copy.
// Parallelisation: a thread handles one column of up to kRows rows, and reads permutation[k] once
// for all of them.
// Mirror: engine/reference/permute_columns.py
#include "common/pdl.cuh"
#include "common/types.cuh"

constexpr int kRows = 8;

extern "C" __global__ void __launch_bounds__(256)
    permute_columns_kernel(const scalar_t* x, int64_t x_stride, const int* permutation,
                           scalar_t* out, int64_t out_stride, int m, int n, int k) {
  pdl_trigger();
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  pdl_wait();
  if (column >= k) return;
  const int from = permutation[column];
  const bool is_inside = from >= 0 && from < n;
  for (int row0 = blockIdx.y * kRows; row0 < m; row0 += gridDim.y * kRows) {
    scalar_t value[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      value[i] = from_float<scalar_t>(0.0f);
      if (is_inside && row0 + i < m) value[i] = x[(row0 + i) * x_stride + from];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (row0 + i < m) out[(row0 + i) * out_stride + column] = value[i];
  }
}
