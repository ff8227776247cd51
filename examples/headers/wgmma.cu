// out = a b^T for rows of 64 values: a warpgroup computes a tile of 64 x 64.
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int kTile = 64, kBytes = kTile * 128;  // 64 values are a row of 128 bytes

// Boxes of both maps: 64 x 64, with the 128-byte swizzle that wgmma_descriptor describes.
extern "C" __global__ void product_64(const __grid_constant__ TensorMap map_a,
                                      const __grid_constant__ TensorMap map_b, float* out, int N) {
  __shared__ __align__(1024) unsigned char smem_a[kBytes], smem_b[kBytes];
  __shared__ uint64_t barrier;
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  const unsigned full = smem_address(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(full, 2 * kBytes);
    tma_load_2d(smem_address(smem_a), &map_a, 0, row0, full);
    tma_load_2d(smem_address(smem_b), &map_b, 0, col0, full);
  }
  __syncthreads();  // all threads see the initialised mbarrier
  mbarrier_wait(full, 0);
  const uint64_t a = wgmma_descriptor(smem_address(smem_a));
  const uint64_t b = wgmma_descriptor(smem_address(smem_b));
  float acc[kTile / 2];
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step)  // 16 values of k are 32 bytes: 2 in a descriptor
    wgmma<kTile>(acc, a + step * 2, b + step * 2, step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(acc);
  const int lane_idx = threadIdx.x % 32;
  const int row = row0 + threadIdx.x / 32 * 16 + lane_idx / 4, col = col0 + lane_idx % 4 * 2;
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
    float* p = out + static_cast<int64_t>(row) * N + col + j * 8;
    store_vec(p, Vec<float, 2>{acc[4 * j], acc[4 * j + 1]});
    store_vec(p + 8 * static_cast<int64_t>(N), Vec<float, 2>{acc[4 * j + 2], acc[4 * j + 3]});
  }
}
