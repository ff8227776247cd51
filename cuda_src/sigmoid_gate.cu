// Rows times the sigmoid of other rows: the gate of an attention's output.
//
//   out = sigmoid(gate) * up,   sigmoid(g) = 1 / (1 + exp(-g))
//
//   gate, up  (T, F) scalar_t   row strides gate_stride and up_stride; up is the op's x
//   out       (T, F) scalar_t   row stride out_stride; may be gate or up
//
// The kernels `sigmoid_gate_heads_*` have a gate per head instead: gate (T, H), F = H * head_dim.
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes (or per element).
// Mirror: engine/reference/sigmoid_gate.py
#include "common/activation.cuh"
#include "common/elementwise.cuh"

ENGINE_GATED(sigmoid_gate_vector, kVec, sigmoid)
ENGINE_GATED(sigmoid_gate_scalar, 1, sigmoid)

// As map_gated, with a gate per head_dim features, which kWidth divides.
template <int kWidth>
__device__ __forceinline__ void gate_heads(const scalar_t* gate, const scalar_t* up, scalar_t* out,
                                           int64_t num_rows, int num_features, int64_t gate_stride,
                                           int64_t up_stride, int64_t out_stride, int head_dim) {
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kGatedThreads + threadIdx.x) * kWidth;
  if (c >= num_features) return;
  const int64_t head = c / head_dim;
  for (int64_t r = blockIdx.y; r < num_rows; r += gridDim.y) {
    const float factor = sigmoid(to_float(gate[r * gate_stride + head]));
    auto y = load_vec<scalar_t, kWidth>(up + r * up_stride + c);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) y.v[j] = from_float<scalar_t>(factor * to_float(y.v[j]));
    store_vec(out + r * out_stride + c, y);
  }
}

#define ENGINE_GATE_HEADS(name, width)                                                             \
  extern "C" __global__ void __launch_bounds__(kGatedThreads) name(                                \
      const scalar_t* gate, const scalar_t* up, scalar_t* out, int64_t num_rows, int num_features, \
      int64_t gate_stride, int64_t up_stride, int64_t out_stride, int head_dim) {                  \
    pdl_trigger();                                                                                 \
    pdl_wait();                                                                                    \
    gate_heads<width>(gate, up, out, num_rows, num_features, gate_stride, up_stride, out_stride,   \
                      head_dim);                                                                   \
  }

ENGINE_GATE_HEADS(sigmoid_gate_heads_vector, kVec)
ENGINE_GATE_HEADS(sigmoid_gate_heads_scalar, 1)
