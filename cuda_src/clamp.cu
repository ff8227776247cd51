// Clamp: out = min(max(x, low), high); NaN stays NaN.
//
//   x, out  (n,) scalar_t   contiguous; out may be x
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes, then one per remaining
// element.
// Mirror: engine/reference/clamp.py
#include "common/elementwise.cuh"

extern "C" __global__ void __launch_bounds__(256)
    clamp_kernel(const scalar_t* x, scalar_t* out, int64_t num_vectors, int64_t n, float low,
                 float high) {
  map_flat(num_vectors, n, [=](float a) { return a < low ? low : (a > high ? high : a); }, out, x);
}
