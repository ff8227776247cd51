// Activations of an expert's gate and up, in float.
#pragma once

#include "common/activation.cuh"

enum MoeActivation { kNone = 0, kSwiglu = 1, kSwigluClamped = 2, kGeglu = 3 };

struct MoeGate {
  int activation;  // a MoeActivation
  float alpha, limit;

  __device__ __forceinline__ bool is_gated() const { return activation != kNone; }

  __device__ __forceinline__ float operator()(float gate, float up) const {
    if (activation == kGeglu) return gelu_tanh(gate) * up;
    return activation == kSwiglu ? silu(gate) * up : clamped(gate, up);
  }
  // Activation with clamped gate and up; propagates NaN in both.
  __device__ __forceinline__ float clamped(float gate, float up) const {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return (up + 1.0f) * __fdividef(gate, 1.0f + expf(-alpha * gate));
  }
};
