// out = x^T for a matrix of 16 x 16, by one warp: stmatrix transposes what ldmatrix has loaded.
#include "common/mma.cuh"
#include "common/sm90.cuh"

extern "C" __global__ void transpose_16(const scalar_t* x, scalar_t* out) {
  __shared__ __align__(16) scalar_t tile[16][16], turned[16][16];
  __shared__ uint64_t barrier;
  const int lane_idx = threadIdx.x;
  if (elect_one()) {
    mbarrier_init(smem_address(&barrier), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(smem_address(&barrier), sizeof(tile));
    bulk_load(smem_address(tile), x, sizeof(tile), smem_address(&barrier));
  }
  __syncwarp();
  mbarrier_wait(smem_address(&barrier), 0);
  // Lane l: row l % 8 of matrix l / 8. Matrices: upper left, lower left, upper right, lower right.
  const int row = lane_idx % 16, col = lane_idx / 16 * 8;
  uint32_t r[4];
  ldmatrix_x4(r, &tile[row][col]);
  // A matrix at (i, j) goes to (j, i), each of its rows to a column.
  const int to_row = col + lane_idx % 8, to_col = lane_idx / 8 % 2 * 8;
  stmatrix_x4_transposed(smem_address(&turned[to_row][to_col]), r[0], r[1], r[2], r[3]);
  __syncwarp();
  for (int i = lane_idx; i < 256; i += 32) out[i] = turned[i / 16][i % 16];
}
