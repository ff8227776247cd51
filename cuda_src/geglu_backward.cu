// Gradient of GeGLU on packed halves: of out = gelu(gate) * up, x = [gate | up].
//
//   dx = [dout * up * gelu'(gate) | dout * gelu(gate)]
//
// Arguments: GatedBackwardParams in common/activation_backward.cuh.
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes (or per element) of dout.
// Mirror: engine/reference/geglu_backward.py
#include "common/activation_backward.cuh"

ENGINE_GATED_BACKWARD(geglu_backward_tanh_vector, kVec, gelu_tanh)
ENGINE_GATED_BACKWARD(geglu_backward_tanh_scalar, 1, gelu_tanh)
ENGINE_GATED_BACKWARD(geglu_backward_erf_vector, kVec, gelu_erf)
ENGINE_GATED_BACKWARD(geglu_backward_erf_scalar, 1, gelu_erf)
