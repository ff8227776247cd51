// out = a b^T on the CUDA cores: a block copies tiles of a and b to shared memory, as floats, and
// each thread keeps 8 x 8 outputs in registers.
//
// Tiles lie in shared memory with k as the row: for one k a thread loads 8 values of a and 8 of b
// in four 16-byte accesses, and multiplies them 64 times. Two buffers alternate, so that one
// barrier per tile suffices, and the next tile is on its way from global memory meanwhile.
#include "common/packed.cuh"
#include "common/reduce.cuh"

constexpr int kThreads = 256;
constexpr int kTile = 128;         // rows and columns of out per block
constexpr int kTileK = 2 * kVec;   // values of k per tile: two 16-byte chunks of a row
constexpr int kPitch = kTile + 4;  // floats per k: 16-byte aligned rows

using Tile = float[kTileK][kPitch];

// One thread's chunk of a tile: 16 bytes of one row of the matrix, zeros outside it.
struct Chunk {
  const scalar_t* from;  // this row of the matrix
  int row, column;       // within the tile
  bool exists;
  Packed<kVec> values;

  __device__ __forceinline__ Chunk(const scalar_t* matrix, int first_row, int num_rows, int K)
      : row(threadIdx.x % kTile), column(threadIdx.x / kTile * kVec) {
    exists = first_row + row < num_rows;
    from = matrix + static_cast<int64_t>(exists ? first_row + row : 0) * K + column;
  }
  __device__ __forceinline__ void load(int k, int K) {
    values = {};
    if (exists && k + column < K) values = load_packed<kVec>(from + k);
  }
  __device__ __forceinline__ void store(Tile& tile) const {
    const auto x = unpack<kVec>(values);
#pragma unroll
    for (int j = 0; j < kVec; ++j) tile[column + j][row] = to_float(x.v[j]);
  }
};

// Four values of group 0 or 1: 64 rows of the tile lie between the groups.
__device__ __forceinline__ void load_eight(float (&x)[8], const float* row, int first) {
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const auto part = load_vec<float, 4>(row + group * (kTile / 2) + first);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[group * 4 + j] = part.v[j];
  }
}

// a and b: 16-byte aligned, K a multiple of kVec.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    product_tiled(const scalar_t* a, const scalar_t* b, scalar_t* out, int M, int N, int K) {
  __shared__ __align__(16) Tile smem_a[2], smem_b[2];
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  // A warp covers 4 x 8 threads, so both of its loads are one pass over the banks.
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  const int row = (warp_idx / 2 * 4 + lane_idx / 8) * 4;
  const int col = (warp_idx % 2 * 8 + lane_idx % 8) * 4;
  Chunk chunk_a(a, row0, M, K), chunk_b(b, col0, N, K);
  float acc[8][8] = {};

  chunk_a.load(0, K);
  chunk_b.load(0, K);
  for (int k = 0, buffer = 0; k < K; k += kTileK, buffer ^= 1) {
    chunk_a.store(smem_a[buffer]);
    chunk_b.store(smem_b[buffer]);
    __syncthreads();  // SAFETY: also, all threads have read the other buffer
    chunk_a.load(k + kTileK, K);
    chunk_b.load(k + kTileK, K);
#pragma unroll
    for (int step = 0; step < kTileK; ++step) {
      float x[8], y[8];
      load_eight(x, smem_a[buffer][step], row);
      load_eight(y, smem_b[buffer][step], col);
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[i][j] += x[i] * y[j];
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int m = row0 + row + i / 4 * (kTile / 2) + i % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int n = col0 + col + j / 4 * (kTile / 2) + j % 4;
      if (m < M && n < N) out[static_cast<int64_t>(m) * N + n] = from_float<scalar_t>(acc[i][j]);
    }
  }
}
