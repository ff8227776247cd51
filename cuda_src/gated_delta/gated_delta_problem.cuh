// The problem of the gated delta rule, and what all its kernels compute alike: gates and norms.
#pragma once

#include "common/state_slots.cuh"
#include "common/types.cuh"

// STATE_BITS: 32 for float states, 16 for bfloat16. HAS_CHANNEL_GATE: one decay per key channel
// instead of one per head.
#if STATE_BITS == 16
using state_t = __nv_bfloat16;
#else
using state_t = float;
#endif
constexpr bool kHasChannelGate = HAS_CHANNEL_GATE != 0;

// States: (num_slots, Hv, dv, dk).
struct GatedDeltaParams : StateSlotParams<state_t> {
  const scalar_t *q, *k;  // (T, Hk, dk), last axis contiguous
  const scalar_t* v;      // (T, Hv, dv), last axis contiguous
  const scalar_t* a;      // (T, Hv), or (T, Hv, dk) with a gate per channel
  const scalar_t* b;      // (T, Hv), last axis contiguous
  const float* a_log;     // (Hv,)
  const float* dt_bias;   // (Hv,) or (Hv, dk), like a
  scalar_t* out;          // (T, Hv, dv) contiguous
  int64_t q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h;  // elements
  int64_t a_stride_t, a_stride_h, b_stride_t;                                      // elements
  int num_key_heads;                                                               // Hk
  int num_heads;           // Hv, a multiple of Hk
  int key_dim, value_dim;  // dk, dv
  int max_steps;           // sequences of more tokens go to the chunk kernels
  float beta_scale, scale, eps;
  float gate_bound;  // lower bound of g with a gate per channel, or 0
  // The gated norm of the output, in the kernel that applies it.
  const scalar_t* z;            // (T, Hv, dv), last axis contiguous
  const scalar_t* norm_weight;  // (dv,)
  int64_t z_stride_t, z_stride_h;
  float norm_eps;
  int norm_is_silu;  // else the sigmoid
  // Of the chunk kernels; see gated_delta_chunk.cuh.
  float* scratch;
  int first_chunk, num_chunks;  // ids of the launch's chunks
  int max_chunks;               // chunks of the largest launch
  int launch;                   // number of the launch
};

// g = -e^a_log softplus(a + dt_bias), the logarithm of a decay; or gate_bound sigmoid(e^a_log (a +
// dt_bias)).
__device__ __forceinline__ float log_decay(const GatedDeltaParams& p, float a, float a_log,
                                           float dt_bias) {
  const float x = a + dt_bias;
  if (kHasChannelGate && p.gate_bound != 0.0f)
    return p.gate_bound / (1.0f + expf(-expf(a_log) * x));
  return -expf(a_log) * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
}

__device__ __forceinline__ float update_strength(float b, float beta_scale) {
  return beta_scale / (1.0f + expf(-b));
}
