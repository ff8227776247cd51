// y, of which a share is set to 0 and the rest scaled up, by a hash of the element's number.
#include "common/types.cuh"

extern "C" __global__ void dropout(const scalar_t* y, scalar_t* out, int64_t N, uint32_t number,
                                   float rate) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= N) return;
  uint32_t x = static_cast<uint32_t>(i) + number * 0x9E3779B9u;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  const bool is_kept = x >= static_cast<uint32_t>(static_cast<double>(rate) * 4294967296.0);
  out[i] = from_float<scalar_t>(is_kept ? to_float(y[i]) * (1.0f / (1.0f - rate)) : 0.0f);
}
