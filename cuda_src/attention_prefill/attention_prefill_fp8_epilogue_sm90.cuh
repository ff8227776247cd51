// Work of attention_prefill_fp8_sm90 before and after the keys of a work tile: the factors that
// turn q.k into scores, and the stores of results.
#pragma once

#include "attention_prefill/attention_prefill_scheduler_sm90.cuh"

// Factors that turn q.k into scores in log2 units, for the two rows of a thread.
struct ScoreFactors {
  const Problem& problem;
  const float* q_scale;
  const float* k_scale;
  float factor;

  __device__ __forceinline__ float2 operator()(const WorkTile& tile, int my_row,
                                               const int (&tokens)[2]) const {
    const float* const q = q_scale + tile.kv_head * problem.group + my_row;
    const float common = factor * k_scale[tile.kv_head];
    return make_float2(common * q[-tokens[0] * problem.group],
                       common * q[8 - tokens[1] * problem.group]);
  }
};

// Destination of the results.
struct Epilogue {
  const Problem& problem;
  const float* v_scale;
  scalar_t* out;
  float* lse;
  int64_t stride_t, stride_h;
  int num_heads, head_dim;
  float base_offset;  // added to score - base in the exponent of P

  // Writes rows my_row and my_row + 8 from their sums `o`: V's columns in the order of
  // transpose_tile, followed by the sums of P, of which each of the row's four threads holds two
  // eighths.
  template <int kCount>
  __device__ __forceinline__ void operator()(const WorkTile& tile, int my_row,
                                             const int (&tokens)[2], int lane_idx,
                                             const float (&o)[kCount],
                                             const float (&base)[2]) const {
    const float scale = v_scale[tile.kv_head];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = o[kCount - 4 + 2 * i] + o[kCount - 3 + 2 * i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (tokens[i] >= tile.tokens) continue;
      const float inverse = sum == 0.0f ? 0.0f : scale / sum;
      const int head = tile.kv_head * problem.group + my_row + 8 * i - tokens[i] * problem.group;
      const int64_t token = tile.first_token + tokens[i];
      if (lse != nullptr && lane_idx % 4 == 0)
        lse[token * num_heads + head] =
            sum == 0.0f ? -kInf : (base[i] - base_offset + log2f(sum)) * kLn2;
      scalar_t* const row = out + token * stride_t + head * stride_h + 4 * (lane_idx % 4);
#pragma unroll
      for (int j = 0; j < (kCount - 4) / 8; ++j) {
        const float* const x = o + 8 * j + 2 * i;
        if (16 * j < head_dim)
          *reinterpret_cast<uint2*>(row + 16 * j) =
              make_uint2(pack2<scalar_t>(x[0] * inverse, x[4] * inverse),
                         pack2<scalar_t>(x[1] * inverse, x[5] * inverse));
      }
    }
  }
};
