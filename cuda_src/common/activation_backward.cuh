// Derivatives of the activations of activation.cuh, and the backward pass over packed rows
// [gate | up].
//
// With e = exp(-|z|), sigmoid(z) is 1 / (1 + e) or e / (1 + e), and its derivative e / (1 + e)^2:
// nothing overflows or cancels in the tails. x = +-inf yields NaN (relu: 0 or 1).
// Mirror: engine/reference/_activation.py
#pragma once

#include "common/activation.cuh"
#include "common/exp2.cuh"
#include "common/packed.cuh"
#include "common/pdl.cuh"

struct Activated {
  float value, slope;  // f(x) and f'(x)
};

// 1 / x, within 1 ulp, for normal x.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// x sigmoid(z), given z / ln 2 and the derivative of z with respect to x. The error of e grows with
// |z|, but e then falls faster.
__device__ __forceinline__ Activated times_sigmoid(float x, float z_log2, float z_slope) {
  const float e = exp2_approx(-fabsf(z_log2));
  const float r = reciprocal_approx(1.0f + e);
  const float rest = e * r;
  const float sigmoid = z_log2 >= 0.0f ? r : rest;
  return {x * sigmoid, sigmoid + x * (rest * r) * z_slope};
}

__device__ __forceinline__ Activated silu_backward(float x) {
  return times_sigmoid(x, kLog2E * x, 1.0f);
}
__device__ __forceinline__ Activated gelu_tanh_backward(float x) {
  constexpr float kTwiceSqrtTwoOverPi = 1.5957691216057308f;
  constexpr float kCubic = 0.044715f * kTwiceSqrtTwoOverPi;
  const float square = fminf(x * x, 1e4f);  // finite; the sigmoid is 0 or 1 there
  const float z_log2 = x * (kLog2E * kTwiceSqrtTwoOverPi + kLog2E * kCubic * square);
  return times_sigmoid(x, z_log2, kTwiceSqrtTwoOverPi + 3.0f * kCubic * square);
}
__device__ __forceinline__ Activated gelu_erf_backward(float x) {
  constexpr float kSqrtHalf = 0.7071067811865476f, kDensityAtZero = 0.3989422804014327f;
  const float probability = 0.5f * erfcf(-kSqrtHalf * x);
  return {x * probability, probability + x * (kDensityAtZero * expf(-0.5f * x * x))};
}
__device__ __forceinline__ Activated relu_backward(float x) {
  return {relu(x), x <= 0.0f ? 0.0f : 1.0f};
}

struct GatedBackwardParams {
  const scalar_t* dout;                      // (T, F)
  const scalar_t* x;                         // (T, 2F) rows [gate | up]
  scalar_t* dx;                              // (T, 2F); may be x
  int64_t num_rows;                          // T
  int num_features;                          // F
  int64_t dout_stride, x_stride, dx_stride;  // elements between rows
};

// Threads per block of gated_backward.
constexpr int kGatedBackwardThreads = 128;

// dx = [dout * up * f'(gate) | dout * f(gate)] for out = f(gate) * up. One thread per kWidth
// features, which all accesses must be aligned to: blockIdx.x indexes features, blockIdx.y rows.
template <int kWidth, typename F>
__device__ __forceinline__ void gated_backward(const GatedBackwardParams& p, F f) {
  using V = Vec<scalar_t, kWidth>;
  pdl_trigger();
  pdl_wait();
  const int64_t c =
      (static_cast<int64_t>(blockIdx.x) * kGatedBackwardThreads + threadIdx.x) * kWidth;
  if (c >= p.num_features) return;
  for (int64_t r = blockIdx.y; r < p.num_rows; r += gridDim.y) {
    const scalar_t* x = p.x + r * p.x_stride + c;
    const V dout = load_vec<scalar_t, kWidth>(p.dout + r * p.dout_stride + c);
    V gate = load_vec<scalar_t, kWidth>(x), up = load_vec<scalar_t, kWidth>(x + p.num_features);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const Activated activated = f(to_float(gate.v[j]));
      const float upstream = to_float(dout.v[j]);
      gate.v[j] = from_float<scalar_t>(upstream * to_float(up.v[j]) * activated.slope);
      up.v[j] = from_float<scalar_t>(upstream * activated.value);
    }
    scalar_t* dx = p.dx + r * p.dx_stride + c;
    store_packed(dx, pack<kWidth>(gate));
    store_packed(dx + p.num_features, pack<kWidth>(up));
  }
}

// Defines the entry point `name` of the backward pass of a gated op with activation `f`.
#define ENGINE_GATED_BACKWARD(name, width, f)                                \
  extern "C" __global__ void __launch_bounds__(kGatedBackwardThreads)        \
      name(const __grid_constant__ GatedBackwardParams p) {                  \
    gated_backward<width>(p, [](float gate) { return f##_backward(gate); }); \
  }
