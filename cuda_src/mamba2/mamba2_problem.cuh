// The problem of Mamba-2's selective state space, and what both its kernels compute alike.
#pragma once

#include "common/state_slots.cuh"
#include "common/types.cuh"

// STATE_BITS: 32 for float states, 16 for bfloat16.
#if STATE_BITS == 16
using state_t = __nv_bfloat16;
#else
using state_t = float;
#endif

// States: (num_slots, H, P, N).
struct Mamba2Params : StateSlotParams<state_t> {
  const scalar_t* x;  // (T, H, P)
  int64_t x_stride_t, x_stride_h;
  const scalar_t* dt;  // (T, H)
  int64_t dt_stride_t;
  const scalar_t* b;  // (T, G, N)
  int64_t b_stride_t, b_stride_h;
  const scalar_t* c;  // (T, G, N)
  int64_t c_stride_t, c_stride_h;
  const float* a_log;    // (H,)
  const float* d;        // (H,)
  const float* dt_bias;  // (H,)
  scalar_t* out;         // (T, H, P) contiguous
  int num_heads;         // H
  int num_groups;        // G
  int head_dim;          // P
  int state_size;        // N
  int max_steps;         // sequences of more tokens go to the chunk kernel
  float dt_min, dt_max;
};

// clip(softplus(dt + dt_bias), dt_min, dt_max), and NaN stays NaN; softplus(x) is log(1 + e^x),
// without overflow.
__device__ __forceinline__ float time_step(const Mamba2Params& p, float dt, float dt_bias) {
  const float x = dt + dt_bias;
  float step = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
  step = step < p.dt_min ? p.dt_min : step;
  return step > p.dt_max ? p.dt_max : step;
}
