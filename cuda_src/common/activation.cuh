// Activation functions in float, in forms free of cancellation in the tails:
//
//   sigmoid(x)   = 1 / (1 + exp(-x))
//   silu(x)      = x sigmoid(x)
//   gelu_tanh(x) = x (1 + tanh u) / 2 = x sigmoid(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)
//   gelu_erf(x)  = x (1 + erf(x / sqrt 2)) / 2 = x erfc(-x / sqrt 2) / 2
//   relu(x)      = max(x, 0), and NaN stays NaN; relu_squared(x) = relu(x)^2
//
// If exp overflows, the quotient is 0, which is correct. x = -inf yields NaN (relu: 0). The
// division is approximate (2 ulp) because the exact one branches.
// Mirror: engine/reference/_activation.py
//
// Public: sm_80 up.
#pragma once

// See the formulas above. Any thread may call them.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }
__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float kTwiceSqrtTwoOverPi = 1.5957691216057308f;
  const float u = kTwiceSqrtTwoOverPi * x * (1.0f + 0.044715f * x * x);
  return __fdividef(x, 1.0f + expf(-u));
}
__device__ __forceinline__ float gelu_erf(float x) {
  constexpr float kSqrtHalf = 0.7071067811865476f;
  return 0.5f * x * erfcf(-kSqrtHalf * x);
}
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }
__device__ __forceinline__ float relu_squared(float x) { return relu(x) * relu(x); }
