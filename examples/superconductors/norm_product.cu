// out = rmsnorm(x) W^T, with W in shared memory.
#include "rows.cuh"

constexpr int kThreads = 256;
constexpr int kStep = 64;  // results of a row per product

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    norm_product(const scalar_t* x, const scalar_t* norm, const scalar_t* weight, scalar_t* out,
                 int64_t rows, int N, float eps) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* const smem = aligned(dynamic);
  copy_matrix<kHidden>(smem, weight, N, N, [](int row) { return result_of(row); });
  fence_async_proxy();
  __syncthreads();  // SAFETY: after it, wgmma reads what all threads have written.
  const unsigned w = smem_address(smem);
  const Lane lane;
  const int64_t tiles = (rows + kGroupRows - 1) / kGroupRows;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / 128);
  for (int64_t tile = blockIdx.x * (kThreads / 128) + threadIdx.x / 128; tile < tiles;
       tile += stride) {
    const int64_t first = tile * kGroupRows + threadIdx.x % 128 / 32 * 16;
    Operand<kBlocks> normed;
    {
      float sums[kHidden / 2];
      load_sums(sums, x, first, rows, lane);
      normalise(normed, sums, norm, eps, lane);
    }
    for (int n = 0; n < N; n += kStep) {
      float sums[kStep / 2];
      wgmma_fence();
      multiply<kStep>(sums, normed, w, N, n, 0, false);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(sums);
      store_sums(out + n, sums, first, rows, N, lane);
    }
  }
}
