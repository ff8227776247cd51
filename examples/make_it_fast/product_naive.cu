// out = a b^T, one thread per output; the block's shape is the launch's choice.
//
// Threads of a warp are neighbours along n, so each of them walks another row of b: with blocks of
// 16 x 16 threads a load fetches 16 sectors of 32 bytes and uses 2 bytes of each.
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    product_naive(const scalar_t* a, const scalar_t* b, scalar_t* out, int M, int N, int K) {
  const int m = blockIdx.y * blockDim.y + threadIdx.y;
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (m >= M || n >= N) return;
  a += static_cast<int64_t>(m) * K;
  b += static_cast<int64_t>(n) * K;
  float sum = 0.0f;
  for (int k = 0; k < K; ++k) sum += to_float(a[k]) * to_float(b[k]);
  out[static_cast<int64_t>(m) * N + n] = from_float<scalar_t>(sum);
}
