// The rotation of one pair of features, with the same bits in every kernel, and its table of
// angles.
#pragma once

#include "common/types.cuh"

// (a, b) -> (a cos - b sin, b cos + a sin). Each fused multiply-add is explicit: otherwise the
// compiler contracts depending on the surrounding code, and two kernels would differ in the last
// place.
__device__ __forceinline__ void rotate_pair(float& a, float& b, float cos, float sin) {
  const float rotated = fmaf(a, cos, -__fmul_rn(b, sin));
  b = fmaf(b, cos, __fmul_rn(a, sin));
  a = rotated;
}

// kWidth cosines or sines of a table row, by 16-byte loads if kWidth >= 4.
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

// The cosines and sines of kWidth pairs of a table row of rotary_dim floats (cosines, then sines),
// from pair `pair` on; NaN if `row` is null: the position is outside the table.
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

// The table row of a position, or null if it is outside the table's num_positions rows.
__device__ __forceinline__ const float* rotation_row(const float* cos_sin, int num_positions,
                                                     int rotary_dim, int position) {
  const bool is_known = position >= 0 && position < num_positions;
  return is_known ? cos_sin + static_cast<int64_t>(position) * rotary_dim : nullptr;
}
