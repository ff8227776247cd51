// SwiGLU: the activation between the two GEMMs of a feed-forward layer.
//
//   out = silu(gate) * up,   silu(g) = g / (1 + exp(-g))
//
//   gate, up  (T, F) scalar_t   row strides gate_stride and up_stride; halves of packed rows
//   out       (T, F) scalar_t   row stride out_stride; may be gate
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes (or per element).
// Mirror: engine/reference/swiglu.py
#include "common/activation.cuh"
#include "common/elementwise.cuh"

ENGINE_GATED(swiglu_vector, kVec, silu)
ENGINE_GATED(swiglu_scalar, 1, silu)
