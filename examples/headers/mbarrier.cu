// out = each row of x backwards, a block per row. One thread copies the row to shared memory.
#include "common/mbarrier.cuh"

extern "C" __global__ void reverse_bulk(const scalar_t* x, scalar_t* out, int N) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ uint64_t barrier;
  const scalar_t* row = reinterpret_cast<const scalar_t*>(smem);
  const unsigned full = smem_address(&barrier);
  const unsigned bytes = N * sizeof(scalar_t);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(full, bytes);
    bulk_load(smem_address(smem), x + static_cast<int64_t>(blockIdx.x) * N, bytes, full);
  }
  __syncthreads();  // all threads see the initialised mbarrier
  mbarrier_wait(full, 0);
  out += static_cast<int64_t>(blockIdx.x) * N;
  for (int i = threadIdx.x; i < N; i += blockDim.x) out[i] = row[N - 1 - i];
}
