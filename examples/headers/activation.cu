// out = silu(x) * y.
#include "common/activation.cuh"
#include "common/types.cuh"

extern "C" __global__ void silu_gate(const scalar_t* x, const scalar_t* y, scalar_t* out,
                                     int64_t N) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(silu(to_float(x[i])) * to_float(y[i]));
}
