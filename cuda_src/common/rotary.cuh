// The rotation of one pair of features, the same bits wherever it is fused.
#pragma once

// (a, b) -> (a cos - b sin, b cos + a sin). Which product is fused into the sum is spelled out: left
// to itself the compiler chooses by the code around, and two kernels differ in the last place.
__device__ __forceinline__ void rotate_pair(float& a, float& b, float cos, float sin) {
  const float rotated = fmaf(a, cos, -__fmul_rn(b, sin));
  b = fmaf(b, cos, __fmul_rn(a, sin));
  a = rotated;
}
