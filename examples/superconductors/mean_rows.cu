// Mean over the rows of each sequence: a block per sequence; threads with the same column, in
// vectors of eight, share its rows.
#include "common/types.cuh"

constexpr int kThreads = 512;

extern "C" __global__ void __launch_bounds__(kThreads)
    mean_rows(const scalar_t* x, scalar_t* out, int64_t L, int C) {
  __shared__ float sums[kThreads][9];  // a column beside the eight keeps the banks apart
  const int vectors = C / 8, parts = kThreads / vectors;
  const int vector = threadIdx.x % vectors, part = threadIdx.x / vectors;
  const scalar_t* const first = x + blockIdx.x * L * C + 8 * vector;
  float sum[8] = {};
  if (part < parts) {
#pragma unroll 4
    for (int64_t row = part; row < L; row += parts) {
      const auto v = load_vec<scalar_t, 8>(first + row * C);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += to_float(v.v[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[threadIdx.x][i] = sum[i];
  __syncthreads();
  for (int c = threadIdx.x; c < C; c += kThreads) {
    float total = 0.0f;
    for (int j = 0; j < parts; ++j) total += sums[j * vectors + c / 8][c % 8];
    out[static_cast<int64_t>(blockIdx.x) * C + c] =
        from_float<scalar_t>(total / static_cast<float>(L));
  }
}
