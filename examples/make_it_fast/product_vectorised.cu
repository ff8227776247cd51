// out = a b^T, one warp per output: its lanes share the sum over k and load 16 bytes each, so a
// warp reads 512 consecutive bytes of a row at a time.
//
// A block multiplies kRows rows of a by as many rows of b as it has groups of kRows warps: its warps
// find most of their rows in L1.
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kRows = 4;

// a and b: 16-byte aligned, K a multiple of kVec. Threads: a multiple of kRows * 32.
extern "C" __global__ void __launch_bounds__(1024)
    product_vectorised(const scalar_t* a, const scalar_t* b, scalar_t* out, int M, int N, int K) {
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  const int m = blockIdx.y * kRows + warp_idx % kRows;
  const int n = blockIdx.x * (blockDim.x / (kRows * kWarpSize)) + warp_idx / kRows;
  if (m >= M || n >= N) return;
  a += static_cast<int64_t>(m) * K;
  b += static_cast<int64_t>(n) * K;
  float sum = 0.0f;
#pragma unroll 4
  for (int k = lane_idx * kVec; k < K; k += kWarpSize * kVec) {
    const auto x = load_vec<scalar_t, kVec>(a + k);
    const auto y = load_vec<scalar_t, kVec>(b + k);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += to_float(x.v[j]) * to_float(y.v[j]);
  }
  sum = warp_sum(sum);
  if (lane_idx == 0) out[static_cast<int64_t>(m) * N + n] = from_float<scalar_t>(sum);
}
