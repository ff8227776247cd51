// Residual add: out = x + residual, or (x + residual) * scale.
//
//   x, residual, out  (n,) scalar_t   contiguous; out may be x or residual
//   scale             (1,) scalar_t
//
// Numerics: in float, rounded once. Parallelisation: one thread per 16 bytes, then one per
// remaining element.
// Mirror: engine/reference/residual_add.py
#include "common/elementwise.cuh"

extern "C" __global__ void __launch_bounds__(256)
    residual_add_kernel(const scalar_t* x, const scalar_t* residual, scalar_t* out,
                        int64_t num_vectors, int64_t n) {
  map_flat(num_vectors, n, [](float a, float b) { return a + b; }, out, x, residual);
}

extern "C" __global__ void __launch_bounds__(256)
    residual_add_scaled(const scalar_t* x, const scalar_t* residual, const scalar_t* scale,
                        scalar_t* out, int64_t num_vectors, int64_t n) {
  const float factor = to_float(*scale);
  map_flat(num_vectors, n, [=](float a, float b) { return (a + b) * factor; }, out, x, residual);
}
