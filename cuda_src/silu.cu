// SiLU (swish): out = x / (1 + exp(-x)).
//
//   x, out  (n,) scalar_t   contiguous; out may be x
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes, then one per remaining
// element.
// Mirror: engine/reference/silu.py
#include "common/activation.cuh"
#include "common/elementwise.cuh"

ENGINE_UNARY(silu_kernel, silu)
