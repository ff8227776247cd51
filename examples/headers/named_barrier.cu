// out = each half of a row of 128 backwards: the two halves of a block do not wait for each other.
#include "common/named_barrier.cuh"

extern "C" __global__ void reverse_halves(const scalar_t* x, scalar_t* out) {
  constexpr int kHalf = 64;
  __shared__ scalar_t row[2 * kHalf];
  const int i = threadIdx.x, half = i / kHalf;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 2 * kHalf;
  row[i] = x[first + i];
  named_barrier_sync<kHalf>(1 + half);
  out[first + i] = row[half * kHalf + kHalf - 1 - i % kHalf];
}
