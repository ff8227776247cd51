// out = the sum of each row of x, a cluster per row: its blocks exchange their shares through
// distributed shared memory. On chips without clusters a block computes the row alone.
#include "common/cluster.cuh"
#include "common/reduce.cuh"

constexpr int kThreads = 128;

extern "C" __global__ void row_sum(const scalar_t* x, float* out, int N) {
  __shared__ float smem[kThreads / kWarpSize], share;
  const int size = cluster_size(), rank = cluster_rank();
  const int64_t row = cluster_index();
  float sum = 0.0f;
  for (int i = rank * kThreads + threadIdx.x; i < N; i += size * kThreads)
    sum += to_float(x[row * N + i]);
  sum = block_sum<kThreads / kWarpSize>(sum, smem);
  if (threadIdx.x == 0) share = sum;
  cluster_sync(size);
  if (rank == 0 && threadIdx.x == 0) {
    float total = 0.0f;
    for (int other = 0; other < size; ++other) total += ld_shared_cluster(&share, other, size);
    out[row] = total;
  }
  cluster_sync(size);  // SAFETY: a block's shared memory is read until here
}
