// out = 16 rounds a b^T, by each warp alone from operands that stay in its registers: how fast
// mma.sync is if nothing has to be loaded. All warps write the same result.
#include "common/mma.cuh"
#include "common/reduce.cuh"

constexpr int kSums = 16;  // independent of each other, so that no mma.sync waits for the last one

extern "C" __global__ void mma_only(const scalar_t* a, const scalar_t* b, float* out, int rounds) {
  const int lane_idx = threadIdx.x % kWarpSize, g = lane_idx / 4, t = lane_idx % 4;
  const auto pair = [&](const scalar_t* x, int row, int column) {
    return *reinterpret_cast<const uint32_t*>(x + row * 16 + column + 2 * t);
  };
  const uint32_t frag_a[4] = {pair(a, g, 0), pair(a, g + 8, 0), pair(a, g, 8), pair(a, g + 8, 8)};
  const uint32_t frag_b[2] = {pair(b, g, 0), pair(b, g, 8)};
  float acc[kSums][4] = {};
  for (int i = 0; i < rounds; ++i)
#pragma unroll
    for (auto& sums : acc) mma_m16n8k16<scalar_t>(sums, frag_a, frag_b);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (const auto& sums : acc) sum += sums[i];
    out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum;
  }
}
