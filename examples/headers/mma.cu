// out = a b^T for matrices of 16 x 16, by one warp: two products of 16 x 8.
#include "common/mma.cuh"

extern "C" __global__ void product_16(const scalar_t* a, const scalar_t* b, float* out) {
  __shared__ __align__(16) scalar_t smem_a[16][16], smem_b[16][16];
  const int lane_idx = threadIdx.x;
  for (int i = lane_idx; i < 256; i += 32) {
    smem_a[i / 16][i % 16] = a[i];
    smem_b[i / 16][i % 16] = b[i];
  }
  __syncwarp();
  uint32_t frag_a[4], frag_b[4];
  // Matrices of a: rows 0-7 and 8-15, then the same rows 8 columns further.
  ldmatrix_x4(frag_a, &smem_a[lane_idx % 16][lane_idx / 16 * 8]);
  // Matrices of b: 8 columns of k, then the next 8, of rows 0-7; then of rows 8-15.
  ldmatrix_x4(frag_b, &smem_b[lane_idx % 8 + lane_idx / 16 * 8][lane_idx / 8 % 2 * 8]);
  for (int half = 0; half < 2; ++half) {
    float acc[4] = {};
    const uint32_t part[2] = {half == 0 ? frag_b[0] : frag_b[2], half == 0 ? frag_b[1] : frag_b[3]};
    mma_m16n8k16<scalar_t>(acc, frag_a, part);
    float* corner = out + lane_idx / 4 * 16 + half * 8 + lane_idx % 4 * 2;
    corner[0] = acc[0], corner[1] = acc[1];
    corner[8 * 16] = acc[2], corner[8 * 16 + 1] = acc[3];
  }
}
