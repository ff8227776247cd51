// out = softmax of each row of x, a block per row.
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kWarps = 4;

extern "C" __global__ void softmax(const scalar_t* x, scalar_t* out, int N) {
  __shared__ float smem[kWarps];
  x += static_cast<int64_t>(blockIdx.x) * N;
  out += static_cast<int64_t>(blockIdx.x) * N;
  float largest = -INFINITY;
  for (int i = threadIdx.x; i < N; i += blockDim.x) largest = fmaxf(largest, to_float(x[i]));
  largest = block_max<kWarps>(largest, smem);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < N; i += blockDim.x) sum += expf(to_float(x[i]) - largest);
  sum = block_sum<kWarps>(sum, smem);
  for (int i = threadIdx.x; i < N; i += blockDim.x)
    out[i] = from_float<scalar_t>(expf(to_float(x[i]) - largest) / sum);
}
