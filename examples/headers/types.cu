// out = factor * x, 16 bytes at a time.
#include "common/types.cuh"

extern "C" __global__ void scale(const scalar_t* x, float factor, scalar_t* out, int64_t N) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVec;
  if (i >= N) return;
  auto values = load_vec<scalar_t, kVec>(x + i);
#pragma unroll
  for (int j = 0; j < kVec; ++j) values.v[j] = from_float<scalar_t>(factor * to_float(values.v[j]));
  store_vec(out + i, values);
}
