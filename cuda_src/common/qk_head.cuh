// Norm and rotation of a q or k head, bit-identical in every kernel that fuses them.
//
// A lane holds the two 16-byte vectors of a head that the rotation pairs up. So D / 2 / kVec
// neighbouring lanes hold a head, and sum its squares with shuffles.
#pragma once

#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "common/rotary.cuh"
#include "common/types.cuh"

__device__ __forceinline__ float norm_scale(float sum_of_squares, int head_dim, float eps) {
  return 1.0f / sqrtf(sum_of_squares / head_dim + eps);
}

__device__ __forceinline__ float normed(float x, float scale, scalar_t weight, float offset) {
  return round_to_scalar(x * scale * (to_float(weight) + offset));
}

// Sum of squares of a head held by `num_lanes` neighbouring lanes (a power of two). All lanes of
// the warp must call it.
__device__ __forceinline__ float head_sum_of_squares(const float (&x)[2 * kVec], int num_lanes) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 2 * kVec; ++j) sum = fmaf(x[j], x[j], sum);
  for (int offset = num_lanes / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kFullMask, sum, offset);
  return sum;
}

__device__ __forceinline__ void to_floats(const Packed<kVec>& packed, float* x) {
  const Vec<scalar_t, kVec> v = unpack<kVec>(packed);
#pragma unroll
  for (int j = 0; j < kVec; ++j) x[j] = to_float(v.v[j]);
}
__device__ __forceinline__ Vec<scalar_t, kVec> rounded(const float* x) {
  Vec<scalar_t, kVec> y;
#pragma unroll
  for (int j = 0; j < kVec; ++j) y.v[j] = from_float<scalar_t>(x[j]);
  return y;
}
