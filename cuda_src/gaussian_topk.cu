// Sparsity by a cutoff per row (Gemma 3n): a top-k of normally distributed features without a sort.
//
//   out = max(x - (mean + factor std), 0)
//
//   x, out  (T, F) scalar_t   row strides in elements; out may be x
//
// Numerics: float, rounded once; std is the population's, from the squared distances to the mean.
// Parallelisation: one block per row, which it reads three times, from L2 after the first.
// Mirror: engine/reference/gaussian_topk.py
#include "common/pdl.cuh"
#include "common/row_block.cuh"

template <int kWidth>
__device__ __forceinline__ void gaussian_topk(const scalar_t* x, scalar_t* out, int n,
                                              float factor) {
  __shared__ float smem_sums[kWarps];
  pdl_trigger();
  pdl_wait();
  const float mean = row_sum<kWidth>(x, n, smem_sums, [](float value) { return value; }) / n;
  const float variance =
      row_sum<kWidth>(x, n, smem_sums,
                      [=](float value) { return (value - mean) * (value - mean); }) /
      n;
  const float cutoff = mean + factor * sqrtf(variance);
  // NaN stays NaN.
  map_row<kWidth>(x, out, n, [=](float value) { return value <= cutoff ? 0.0f : value - cutoff; });
}

#define ENGINE_GAUSSIAN_TOPK(name, width)                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads)                                  \
      name(const scalar_t* x, scalar_t* out, int n, int64_t x_stride, int64_t out_stride, \
           float factor) {                                                                \
    const int64_t row = blockIdx.x;                                                       \
    gaussian_topk<width>(x + row * x_stride, out + row * out_stride, n, factor);          \
  }

ENGINE_GAUSSIAN_TOPK(gaussian_topk_vector, kVec)
ENGINE_GAUSSIAN_TOPK(gaussian_topk_scalar, 1)
