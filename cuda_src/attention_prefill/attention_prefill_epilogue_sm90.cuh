// Epilogue of attention_prefill_sm90: writes rows to `out` or, with splits, to `partial`.
#pragma once

#include "attention_prefill/attention_prefill_scheduler_sm90.cuh"

struct Epilogue {
  const Problem& problem;
  const float* sinks;  // (H,); null if there are none, or if the combine kernel adds them
  scalar_t* out;
  float* lse;
  float* partial;
  int64_t stride_t, stride_h;
  int num_heads, value_dim;
  const float* v_scale;  // (K,) scales of quantized values

  // Writes rows my_row and my_row + 8. `o` has the accumulator layout of wgmma.cuh; `base` was
  // subtracted from the exponents of 2, and `sum` is the sum of exponentials. All three are
  // overwritten.
  template <int kCount>
  __device__ __forceinline__ void operator()(const WorkTile& tile, int my_row,
                                             const int (&tokens)[2], int lane_idx,
                                             float (&o)[kCount], float (&base)[2],
                                             float (&sum)[2]) const {
    const auto head_of = [&](int i) {
      return tile.kv_head * problem.group + my_row + 8 * i - tokens[i] * problem.group;
    };
    float inverse[2], rescale[2] = {1.0f, 1.0f};
    if (sinks != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (sum[i] == 0.0f) base[i] = -kInf;
        rescale[i] = add_sink(sinks[head_of(i)] * kLog2E, base[i], sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      inverse[i] = sum[i] == 0.0f ? 0.0f : rescale[i] * __fdividef(1.0f, sum[i]);
    if constexpr (kHasCodes) {
      const float scale = v_scale[tile.kv_head];
      inverse[0] *= scale;
      inverse[1] *= scale;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) o[j] *= inverse[j / 2 % 2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = tokens[i] < tile.tokens;
      const int head = head_of(i);
      const int64_t token = tile.first_token + tokens[i];
      const float log2_sum = sum[i] == 0.0f ? -kInf : base[i] + log2f(sum[i]);
      if (problem.splits == 1) {
        if (exists && lse != nullptr && lane_idx % 4 == 0)
          lse[token * num_heads + head] = log2_sum * kLn2;
        store_row<2 * kCount>(out + token * stride_t + head * stride_h, exists, value_dim, lane_idx,
                              o, i, 1.0f);
      } else if (exists) {
        const int64_t rows = static_cast<int64_t>(problem.total_q) * num_heads;
        const int64_t index = tile.split * rows + token * num_heads + head;
        if (lane_idx % 4 == 0) partial[problem.splits * rows * value_dim + index] = log2_sum;
        float* const row = partial + index * value_dim + 2 * (lane_idx % 4);
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j)
          if (8 * j < value_dim)
            *reinterpret_cast<float2*>(row + 8 * j) =
                make_float2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
      }
    }
  }
};
