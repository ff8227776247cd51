// xIELU: an activation with coefficients that are trained, one set per layer.
//
//   out = a_p x^2 + b x                           x > 0
//   out = a_n (expm1(min(x, eps)) - x) + b x      otherwise (and for NaN)
//
//   x, out        (n,) scalar_t  contiguous; out may be x
//   coefficients  (4,) float     a_p, a_n, b, eps
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes, then one per remaining
// element.
// Mirror: engine/reference/xielu.py
#include "common/elementwise.cuh"

extern "C" __global__ void __launch_bounds__(256)
    xielu_kernel(const scalar_t* x, const float* coefficients, scalar_t* out, int64_t num_vectors,
                 int64_t n) {
  const float positive = coefficients[0], negative = coefficients[1];
  const float slope = coefficients[2], eps = coefficients[3];
  map_flat(
      num_vectors, n,
      [=](float a) {
        const float curve =
            a > 0.0f ? positive * a * a : negative * (expm1f(a < eps ? a : eps) - a);
        return fmaf(slope, a, curve);
      },
      out, x);
}
