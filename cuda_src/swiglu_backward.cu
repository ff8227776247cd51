// Gradient of SwiGLU on packed halves: of out = silu(gate) * up, x = [gate | up].
//
//   dx = [dout * up * silu'(gate) | dout * silu(gate)]
//
// Arguments: GatedBackwardParams in common/activation_backward.cuh.
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes (or per element) of dout.
// Mirror: engine/reference/swiglu_backward.py
#include "common/activation_backward.cuh"

ENGINE_GATED_BACKWARD(swiglu_backward_vector, kVec, silu)
ENGINE_GATED_BACKWARD(swiglu_backward_scalar, 1, silu)
