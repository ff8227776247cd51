// SwiGLU on packed halves: the activation between the two GEMMs of a feed-forward layer.
//
//   out = silu(gate) * up,   x = [gate | up],   silu(g) = g / (1 + exp(-g))
//
//   x    (T, 2F) scalar_t   row stride x_stride
//   out  (T, F)  scalar_t   row stride out_stride; may be the gate half of x
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes (or per element).
// Mirror: engine/reference/swiglu.py
#include "common/activation.cuh"
#include "common/elementwise.cuh"

ENGINE_GATED(swiglu_vector, kVec, silu)
ENGINE_GATED(swiglu_scalar, 1, silu)
