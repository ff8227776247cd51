// Gradient of an ungated activation: dx = dout * f'(x).
//
//   dout, x, dx  (n,) scalar_t   contiguous; dx may be dout or x
//
// Numerics: float, rounded once. Parallelisation: one thread per 16 bytes, then one per remaining
// element.
// Mirror: engine/reference/activation_backward.py
#include "common/activation_backward.cuh"
#include "common/elementwise.cuh"

#define ENGINE_ACTIVATION_BACKWARD(f)                                                          \
  extern "C" __global__ void __launch_bounds__(256) activation_backward_##f(                   \
      const scalar_t* dout, const scalar_t* x, scalar_t* dx, int64_t num_vectors, int64_t n) { \
    const auto gradient = [](float d, float a) { return d * f##_backward(a).slope; };          \
    map_flat(num_vectors, n, gradient, dx, dout, x);                                           \
  }

ENGINE_ACTIVATION_BACKWARD(silu)
ENGINE_ACTIVATION_BACKWARD(gelu_erf)
ENGINE_ACTIVATION_BACKWARD(gelu_tanh)
ENGINE_ACTIVATION_BACKWARD(relu)
