// Rows times a factor, or all rows times one factor, read from device memory.
//
//   out[r] = x[r] * factors[r * factor_stride]
//
//   x        (M, N) scalar_t   row stride x_stride
//   factors  (M,) or (1,) float   factor_stride 1 or 0
//   out      (M, N) scalar_t   row stride out_stride; may be x
//
// Numerics: multiplied in float, rounded once. A row that is scaled in place by 1 is not touched: a
// loss is mostly scaled by 1, and its gradients then cost no memory traffic.
// Parallelisation: one thread per kWidth columns of kRows rows, all loaded before the first store;
// blockIdx.x walks a row, blockIdx.y the rows.
// Mirror: engine/reference/scale_rows.py
#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kRows = 4;

template <int kWidth>
__device__ __forceinline__ void scale_rows(const scalar_t* x, const float* factors,
                                           int factor_stride, scalar_t* out, int64_t num_rows,
                                           int64_t n, int64_t x_stride, int64_t out_stride) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (column >= n) return;
  const bool is_in_place = x == out;
  if (is_in_place && factor_stride == 0 && factors[0] == 1.0f) return;
  for (int64_t first = blockIdx.y; first < num_rows;
       first += kRows * static_cast<int64_t>(gridDim.y)) {
    const auto row = [&](int i) { return first + i * static_cast<int64_t>(gridDim.y); };
    float scales[kRows];
    Packed<kWidth> rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      scales[i] = row(i) < num_rows ? factors[row(i) * factor_stride] : 1.0f;
      rows[i] = Packed<kWidth>{};
      if (row(i) < num_rows) rows[i] = load_packed<kWidth>(x + row(i) * x_stride + column);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row(i) >= num_rows || (is_in_place && scales[i] == 1.0f)) continue;
      Vec<scalar_t, kWidth> v = unpack<kWidth>(rows[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v.v[j] = from_float<scalar_t>(to_float(v.v[j]) * scales[i]);
      store_vec(out + row(i) * out_stride + column, v);
    }
  }
}

#define ENGINE_SCALE_ROWS(name, width)                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads)                                  \
      name(const scalar_t* x, const float* factors, int factor_stride, scalar_t* out,     \
           int64_t num_rows, int64_t n, int64_t x_stride, int64_t out_stride) {           \
    pdl_trigger();                                                                        \
    pdl_wait();                                                                           \
    scale_rows<width>(x, factors, factor_stride, out, num_rows, n, x_stride, out_stride); \
  }

ENGINE_SCALE_ROWS(scale_rows_vector, kVec)
ENGINE_SCALE_ROWS(scale_rows_scalar, 1)
