// out = 2 x, a box of 64 x 64 per block. TMA clips boxes at the edges: any M and N will do.
#include "common/tma.cuh"

constexpr int kBox = 64;

extern "C" __global__ void twice(const __grid_constant__ TensorMap map_x,
                                 const __grid_constant__ TensorMap map_out) {
  __shared__ __align__(128) scalar_t box[kBox * kBox];
  __shared__ uint64_t barrier;
  const unsigned full = smem_address(&barrier), smem = smem_address(box);
  const int col = blockIdx.x * kBox, row = blockIdx.y * kBox;
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(full, sizeof(box));
    tma_load_2d(smem, &map_x, col, row, full);
  }
  __syncthreads();  // all threads see the initialised mbarrier
  mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < kBox * kBox; i += blockDim.x)
    box[i] = from_float<scalar_t>(2.0f * to_float(box[i]));
  fence_async_proxy();  // TMA sees what this thread wrote ...
  __syncthreads();      // ... and what the others did
  if (threadIdx.x == 0) {
    tma_store_2d(&map_out, col, row, smem);
    bulk_commit();
    bulk_wait();  // shared memory must outlive the copy
  }
}
