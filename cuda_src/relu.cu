// ReLU: out = max(x, 0), or its square; NaN stays NaN.
//
//   x, out  (n,) scalar_t   contiguous; out may be x
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes, then one per remaining
// element.
// Mirror: engine/reference/relu.py
#include "common/activation.cuh"
#include "common/elementwise.cuh"

ENGINE_UNARY(relu_kernel, relu)
ENGINE_UNARY(relu_squared_kernel, relu_squared)
