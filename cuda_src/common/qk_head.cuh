// The norm and the rotation of a head of q or k, the same bits wherever they are fused.
//
// A lane has two 16-byte vectors of a head, those that the rotation pairs up, so D / 2 / kVec
// neighbours hold a head and sum its squares by shuffles.
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

// Of a head that `lanes` neighbours hold, a power of two; all lanes of the warp must call it.
__device__ __forceinline__ float head_sum_of_squares(const float (&x)[2 * kVec], int lanes) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 2 * kVec; ++j) sum = fmaf(x[j], x[j], sum);
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kFullMask, sum, offset);
  return sum;
}

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

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

// kVec floats of the table.
__device__ __forceinline__ void load_angles(const float* p, float (&x)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; i += 4) {
    const Vec<float, 4> part = load_vec<float, 4>(p + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i + j] = part.v[j];
  }
}
