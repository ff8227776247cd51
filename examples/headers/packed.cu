// out = x + y; 32 bytes of each are in flight before any of them is used.
#include "common/packed.cuh"

constexpr int kLoads = 2;  // accesses in flight per thread and array

extern "C" __global__ void add(const scalar_t* x, const scalar_t* y, scalar_t* out, int64_t N) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x * kLoads * kVec;
  const auto offset = [&](int i) { return first + (i * blockDim.x + threadIdx.x) * kVec; };
  Packed<kVec> a[kLoads] = {}, b[kLoads] = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (offset(i) >= N) continue;
    a[i] = load_packed<kVec>(x + offset(i));
    b[i] = load_packed<kVec>(y + offset(i));
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (offset(i) >= N) continue;
    auto sum = unpack<kVec>(a[i]);
    const auto other = unpack<kVec>(b[i]);
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      sum.v[j] = from_float<scalar_t>(to_float(sum.v[j]) + to_float(other.v[j]));
    store_vec(out + offset(i), sum);
  }
}
