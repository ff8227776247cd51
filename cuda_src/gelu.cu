// GELU: out = x Phi(x) = x (1 + erf(x / sqrt 2)) / 2, or its approximation
// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
//
//   x, out  (n,) scalar_t   contiguous; out may be x
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes, then one per remaining
// element.
// Mirror: engine/reference/gelu.py
#include "common/activation.cuh"
#include "common/elementwise.cuh"

ENGINE_UNARY(gelu_erf_kernel, gelu_erf)
ENGINE_UNARY(gelu_tanh_kernel, gelu_tanh)
