// Scales every row of x to the root mean square of a row of target.
//
//   out = x sqrt(mean(target^2)) / sqrt(max(mean(x^2), least))
//
//   x, target, out  (T, N) scalar_t   row strides in elements; out may be x
//
// Numerics: float, rounded once. Parallelisation: one block per row, which it reads twice.
// Mirror: engine/reference/match_rms.py
#include "common/pdl.cuh"
#include "common/row_block.cuh"

template <int kWidth>
__device__ __forceinline__ void match_rms(const scalar_t* x, const scalar_t* target, scalar_t* out,
                                          int n, float least) {
  __shared__ float smem_sums[kWarps];
  pdl_trigger();
  pdl_wait();
  const auto square = [](float value) { return value * value; };
  const float given = row_sum<kWidth>(x, n, smem_sums, square) / n;
  const float wanted = row_sum<kWidth>(target, n, smem_sums, square) / n;
  const float ratio = sqrtf(wanted) / sqrtf(given < least ? least : given);  // NaN stays NaN
  map_row<kWidth>(x, out, n, [=](float value) { return value * ratio; });
}

#define ENGINE_MATCH_RMS(name, width)                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads)                                          \
      name(const scalar_t* x, const scalar_t* target, scalar_t* out, int n, int64_t x_stride,     \
           int64_t target_stride, int64_t out_stride, float least) {                              \
    const int64_t row = blockIdx.x;                                                               \
    match_rms<width>(x + row * x_stride, target + row * target_stride, out + row * out_stride, n, \
                     least);                                                                      \
  }

ENGINE_MATCH_RMS(match_rms_vector, kVec)
ENGINE_MATCH_RMS(match_rms_scalar, 1)
