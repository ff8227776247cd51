// ReLU: out = max(x, 0), or its square; NaN stays NaN. Gated: out = that of gate, times up.
//
//   x, out    (n,) scalar_t     contiguous; out may be x
//   gate, up  (T, F) scalar_t   row strides gate_stride, up_stride: halves of rows; out may be gate
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes, then one per remaining
// element; gated, one thread per 16 bytes (or per element).
// Mirror: engine/reference/relu.py
#include "common/activation.cuh"
#include "common/elementwise.cuh"

ENGINE_UNARY(relu_kernel, relu)
ENGINE_UNARY(relu_squared_kernel, relu_squared)

ENGINE_GATED(relu_gated_vector, kVec, relu)
ENGINE_GATED(relu_gated_scalar, 1, relu)
ENGINE_GATED(relu_squared_gated_vector, kVec, relu_squared)
ENGINE_GATED(relu_squared_gated_scalar, 1, relu_squared)
