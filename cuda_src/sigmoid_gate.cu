// Rows times the sigmoid of other rows: the gate of an attention's output.
//
//   out = x sigmoid(gate),   sigmoid(g) = 1 / (1 + exp(-g))
//
//   x     (T, F) scalar_t   row stride x_stride
//   gate  (T, F) scalar_t   row stride gate_stride
//   out   (T, F) scalar_t   row stride out_stride; may be x or gate
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes (or per element).
// Mirror: engine/reference/sigmoid_gate.py
#include "common/activation.cuh"
#include "common/elementwise.cuh"

template <int kWidth>
__device__ __forceinline__ void sigmoid_gate(const scalar_t* x, const scalar_t* gate, scalar_t* out,
                                             int64_t num_rows, int num_features, int64_t x_stride,
                                             int64_t gate_stride, int64_t out_stride) {
  pdl_trigger();
  pdl_wait();
  map_gated<kWidth>(gate, x, out, num_rows, num_features, gate_stride, x_stride, out_stride,
                    [](float g) { return sigmoid(g); });
}

extern "C" __global__ void __launch_bounds__(kGatedThreads)
    sigmoid_gate_vector(const scalar_t* x, const scalar_t* gate, scalar_t* out, int64_t num_rows,
                        int num_features, int64_t x_stride, int64_t gate_stride,
                        int64_t out_stride) {
  sigmoid_gate<kVec>(x, gate, out, num_rows, num_features, x_stride, gate_stride, out_stride);
}

extern "C" __global__ void __launch_bounds__(kGatedThreads)
    sigmoid_gate_scalar(const scalar_t* x, const scalar_t* gate, scalar_t* out, int64_t num_rows,
                        int num_features, int64_t x_stride, int64_t gate_stride,
                        int64_t out_stride) {
  sigmoid_gate<1>(x, gate, out, num_rows, num_features, x_stride, gate_stride, out_stride);
}
