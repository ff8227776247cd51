// Gradients of the activation between an expert's two products, and of the routing weights.
//
//   dh       = weight dy act'(h),   h = [gate | up]
//   scaled   = weight act(h)
//   dweights = sum over the row of dy act(h)
//
//   dy        (P, F) scalar_t    gradient of weight act(h) per unit of weight, sorted by expert
//   h         (P, 2F) scalar_t   sorted by expert
//   order     (P,) int           pair of each row
//   weights   (P,) float         routing weight of each pair
//   dh        (P, 2F) scalar_t
//   scaled    (P, F) scalar_t    input of the second product, times the routing weight
//   dweights  (P,) float         by pair
//
// All arrays are contiguous. act is silu(gate) up or, with kSwigluClamped, that of moe_gemm. A
// clamped value has the gradient 0.
//
// Numerics: float, each result rounded once. A row is summed in an order that depends on F only.
// Parallelisation: a warp per row, 16 bytes a lane and array at a time.
// Mirror: engine/reference/moe_activation_backward.py
#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;
constexpr int kSwigluClamped = 2;  // value in enum MoeActivation

// act(gate, up), and its derivatives.
struct Gradient {
  float y, by_gate, by_up;
};

struct Activation {
  bool is_clamped;
  float alpha, limit;

  __device__ __forceinline__ Gradient operator()(float gate, float up) const {
    if (!is_clamped) return gradient(gate, up, 1.0f, 0.0f);
    const bool gate_moves = !(gate > limit), up_moves = !(fabsf(up) > limit);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    Gradient g = gradient(gate, up, alpha, 1.0f);
    if (!gate_moves) g.by_gate = 0.0f;
    if (!up_moves) g.by_up = 0.0f;
    return g;
  }

  // Derivatives of gate sigmoid(slope gate) (up + shift).
  static __device__ __forceinline__ Gradient gradient(float gate, float up, float slope,
                                                      float shift) {
    const float sigmoid = __fdividef(1.0f, 1.0f + expf(-slope * gate));
    const float swish = gate * sigmoid;
    return {swish * (up + shift), (up + shift) * (sigmoid + slope * swish * (1.0f - sigmoid)),
            swish};
  }
};

template <int kWidth>
__device__ __forceinline__ void differentiate(const scalar_t* dy, const scalar_t* h,
                                              const int* order, const float* weights, scalar_t* dh,
                                              scalar_t* scaled, float* dweights, int num_pairs,
                                              int num_features, const Activation& activation) {
  pdl_trigger();
  pdl_wait();
  const int lane_idx = threadIdx.x % kWarpSize;
  const int row = blockIdx.x * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (row >= num_pairs) return;
  const int pair = order[row];
  if (pair < 0 || pair >= num_pairs) return;
  const float weight = weights[pair];
  const int64_t at = static_cast<int64_t>(row) * num_features;
  float sum = 0.0f;
#pragma unroll 2
  for (int column = lane_idx * kWidth; column < num_features; column += kWarpSize * kWidth) {
    const int64_t gate_at = 2 * at + column, up_at = gate_at + num_features;
    const Vec<scalar_t, kWidth> d = unpack<kWidth>(load_packed<kWidth>(dy + at + column));
    const Vec<scalar_t, kWidth> gate = unpack<kWidth>(load_packed<kWidth>(h + gate_at));
    const Vec<scalar_t, kWidth> up = unpack<kWidth>(load_packed<kWidth>(h + up_at));
    Vec<scalar_t, kWidth> d_gate, d_up, y;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const Gradient g = activation(to_float(gate.v[i]), to_float(up.v[i]));
      const float own = to_float(d.v[i]);
      sum += own * g.y;
      d_gate.v[i] = from_float<scalar_t>(own * weight * g.by_gate);
      d_up.v[i] = from_float<scalar_t>(own * weight * g.by_up);
      y.v[i] = from_float<scalar_t>(weight * g.y);
    }
    store_vec(dh + gate_at, d_gate);
    store_vec(dh + up_at, d_up);
    store_vec(scaled + at + column, y);
  }
  sum = warp_sum(sum);
  if (lane_idx == 0) dweights[pair] = sum;
}

#define ENGINE_MOE_ACTIVATION_BACKWARD(name, width)                                            \
  extern "C" __global__ void __launch_bounds__(kThreads)                                       \
      name(const scalar_t* dy, const scalar_t* h, const int* order, const float* weights,      \
           scalar_t* dh, scalar_t* scaled, float* dweights, int num_pairs, int num_features,   \
           int activation, float alpha, float limit) {                                         \
    differentiate<width>(dy, h, order, weights, dh, scaled, dweights, num_pairs, num_features, \
                         {activation == kSwigluClamped, alpha, limit});                        \
  }

ENGINE_MOE_ACTIVATION_BACKWARD(moe_activation_backward_vector, kVec)
ENGINE_MOE_ACTIVATION_BACKWARD(moe_activation_backward_scalar, 1)
