// Rotation of one pair of features, bit-identical in every kernel, and access to the cos/sin table.
#pragma once

#include "common/types.cuh"

// (a, b) -> (a cos - b sin, b cos + a sin). The fused multiply-adds are explicit: otherwise
// contraction would depend on the surrounding code, and two kernels could differ in the last bit.
__device__ __forceinline__ void rotate_pair(float& a, float& b, float cos, float sin) {
  const float rotated = fmaf(a, cos, -__fmul_rn(b, sin));
  b = fmaf(b, cos, __fmul_rn(a, sin));
  a = rotated;
}

// Loads kWidth cosines or sines of a table row, with 16-byte loads if kWidth >= 4.
template <int kWidth>
__device__ __forceinline__ void load_angles(const float* p, float (&x)[kWidth]) {
  constexpr int kStep = kWidth < 4 ? kWidth : 4;
#pragma unroll
  for (int i = 0; i < kWidth; i += kStep) {
    const Vec<float, kStep> part = load_vec<float, kStep>(p + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) x[i + j] = part.v[j];
  }
}

// Loads the cosines and sines of kWidth pairs, from pair `pair` on, of a table row of rotary_dim
// floats (cosines, then sines). They are NaN if `row` is null, that is, the position is outside the
// table.
template <int kWidth>
__device__ __forceinline__ void load_rotation(const float* row, int rotary_dim, int pair,
                                              float (&cos)[kWidth], float (&sin)[kWidth]) {
  if (row != nullptr) {
    load_angles(row + pair, cos);
    load_angles(row + rotary_dim / 2 + pair, sin);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) cos[j] = sin[j] = quiet_nan();
  }
}

// Returns the table row of a position, or null if the position is not in [0, num_positions).
__device__ __forceinline__ const float* rotation_row(const float* cos_sin, int num_positions,
                                                     int rotary_dim, int position) {
  const bool is_known = position >= 0 && position < num_positions;
  return is_known ? cos_sin + static_cast<int64_t>(position) * rotary_dim : nullptr;
}
