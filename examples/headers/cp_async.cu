// out = each row of x backwards, a block per row. All threads copy the row to shared memory.
#include "common/cp_async.cuh"

extern "C" __global__ void reverse(const scalar_t* x, scalar_t* out, int N) {
  extern __shared__ __align__(16) unsigned char smem[];
  scalar_t* row = reinterpret_cast<scalar_t*>(smem);
  x += static_cast<int64_t>(blockIdx.x) * N;
  out += static_cast<int64_t>(blockIdx.x) * N;
  for (int i = threadIdx.x * kVec; i < N; i += blockDim.x * kVec) cp_async_16(row + i, x + i);
  cp_async_commit();
  cp_async_wait<0>();  // this thread's copies have landed ...
  __syncthreads();     // ... and everyone else's
  for (int i = threadIdx.x; i < N; i += blockDim.x) out[i] = row[N - 1 - i];
}
