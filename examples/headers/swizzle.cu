// out = x^T, a tile of 64 x 64 16-bit values per block. Rows enter shared memory in chunks of
// eight, columns leave it; the swizzle keeps both nearly free of bank conflicts.
#include "common/swizzle.cuh"
#include "common/types.cuh"

constexpr int kTile = 64;

extern "C" __global__ void transpose(const scalar_t* x, scalar_t* out, int M, int N) {
  __shared__ __align__(16) unsigned char smem[kTile * kSwizzleRowBytes];
  const int64_t row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  const auto at = [&](int row, int col) {
    return reinterpret_cast<scalar_t*>(smem + swizzle_128b(row, col / kVec)) + col % kVec;
  };
  for (int i = threadIdx.x; i < kTile * kTile / kVec; i += blockDim.x) {
    const int row = i / (kTile / kVec), col = i % (kTile / kVec) * kVec;
    store_vec(at(row, col), load_vec<scalar_t, kVec>(x + (row0 + row) * N + col0 + col));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTile * kTile / kVec; i += blockDim.x) {
    const int col = i / (kTile / kVec), row = i % (kTile / kVec) * kVec;
    Vec<scalar_t, kVec> values;
#pragma unroll
    for (int j = 0; j < kVec; ++j) values.v[j] = *at(row + j, col);
    store_vec(out + (col0 + col) * M + row0 + row, values);
  }
}
