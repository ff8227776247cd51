// Rows times the sigmoid of other rows: the gate of an attention's output.
//
//   out = sigmoid(gate) * up,   sigmoid(g) = 1 / (1 + exp(-g))
//
//   gate, up  (T, F) scalar_t   row strides gate_stride and up_stride; up is the op's x
//   out       (T, F) scalar_t   row stride out_stride; may be gate or up
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes (or per element).
// Mirror: engine/reference/sigmoid_gate.py
#include "common/activation.cuh"
#include "common/elementwise.cuh"

ENGINE_GATED(sigmoid_gate_vector, kVec, sigmoid)
ENGINE_GATED(sigmoid_gate_scalar, 1, sigmoid)
