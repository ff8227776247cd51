// GeGLU: the activation between the two GEMMs of Gemma's feed-forward layer.
//
//   out = gelu(gate) * up
//
//   gate, up  (T, F) scalar_t   row strides gate_stride, up_stride; halves of rows, or two arrays
//   out       (T, F) scalar_t   row stride out_stride; may be gate
//
// gelu(g) is g Phi(g) (erf) or its tanh approximation, see common/activation.cuh.
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes (or per element).
// Mirror: engine/reference/geglu.py
#include "common/activation.cuh"
#include "common/elementwise.cuh"

ENGINE_GATED(geglu_tanh_vector, kVec, gelu_tanh)
ENGINE_GATED(geglu_tanh_scalar, 1, gelu_tanh)
ENGINE_GATED(geglu_erf_vector, kVec, gelu_erf)
ENGINE_GATED(geglu_erf_scalar, 1, gelu_erf)
