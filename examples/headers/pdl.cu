// out = x + 1. Launched with pdl=True it starts while the preceding kernel still runs.
#include "common/pdl.cuh"

extern "C" __global__ void increment(const scalar_t* x, scalar_t* out, int64_t N) {
  pdl_trigger();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  pdl_wait();  // the preceding kernel may write x, or read out
  if (i < N) out[i] = from_float<scalar_t>(to_float(x[i]) + 1.0f);
}
