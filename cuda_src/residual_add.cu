// Residual add: out = x + residual.
//
//   x, residual, out  (n,) scalar_t   contiguous; out may be x or residual
//
// Numerics: the sum in float, rounded once. Parallelisation: one thread per 16 bytes, then one per
// remaining element.
// Mirror: engine/reference/residual_add.py
#include "common/elementwise.cuh"

extern "C" __global__ void __launch_bounds__(256)
    residual_add_kernel(const scalar_t* x, const scalar_t* residual, scalar_t* out,
                        int64_t num_vectors, int64_t n) {
  map_flat(num_vectors, n, [](float a, float b) { return a + b; }, out, x, residual);
}
