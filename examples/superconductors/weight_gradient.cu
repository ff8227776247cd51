// dW = dy^T x over very many rows: each block sums a tile of dW over its share of the rows, and a
// second kernel adds the shares, always in the same order.
//
// Both operands are read as they lie: rows of dy and x reach shared memory by cp.async, and ldmatrix
// transposes them, since the sum runs along the rows.
#include "common/cp_async.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"

constexpr int kTile = 128;      // columns of dy, and of x, per block
constexpr int kStageRows = 32;  // rows per stage
constexpr int kStages = 4;
constexpr int kChunks = kTile / 8;  // 16-byte chunks in a row of a tile
constexpr int kTileElements = kStageRows * kTile;
constexpr int kThreads = 256;

// Offset of a row's chunk. Rows are swizzled: one chunk of eight rows touches all banks.
__device__ __forceinline__ int place(int row, int chunk) {
  return row * kTile + 8 * (chunk ^ (row % 8));
}

// Starts the copy of rows [row, row + kStageRows) and columns [column, column + kTile) of a matrix;
// elements outside the matrix become 0.
__device__ __forceinline__ void copy_tile(scalar_t* smem, const scalar_t* x, int64_t row,
                                          int64_t end, int column, int width) {
#pragma unroll
  for (int i = threadIdx.x; i < kStageRows * kChunks; i += kThreads) {
    const int r = i / kChunks, chunk = i % kChunks;
    const bool is_inside = row + r < end && column + 8 * chunk < width;
    const scalar_t* const source = is_inside ? x + (row + r) * width + column + 8 * chunk : x;
    cp_async_16(smem + place(r, chunk), source, is_inside);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    partial_products(const scalar_t* dy, const scalar_t* x, float* partials, int64_t R, int N,
                     int K, int64_t share) {
  extern __shared__ __align__(128) unsigned char smem[];
  scalar_t* const tiles = reinterpret_cast<scalar_t*>(smem);  // per stage: dy, then x
  const int n0 = blockIdx.x * kTile, k0 = blockIdx.y * kTile;
  const int64_t first = blockIdx.z * share, end = min(first + share, R);
  const int steps = static_cast<int>((end - first + kStageRows - 1) / kStageRows);
  const auto copy_stage = [&](int step) {
    if (step < steps) {
      scalar_t* const stage = tiles + step % kStages * 2 * kTileElements;
      const int64_t row = first + static_cast<int64_t>(step) * kStageRows;
      copy_tile(stage, dy, row, end, n0, N);
      copy_tile(stage + kTileElements, x, row, end, k0, K);
    }
    cp_async_commit();
  };
  for (int step = 0; step < kStages - 1; ++step) copy_stage(step);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n = warp % 4 * 32,
            k = warp / 4 * 64;  // first row and column of the warp's 32 x 64 results
  float d[2][8][4] = {};
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // SAFETY: the stage has landed for all, and all have read the one before.
    copy_stage(step + kStages - 1);
    const scalar_t* const of_dy = tiles + step % kStages * 2 * kTileElements;
    const scalar_t* const of_x = of_dy + kTileElements;
#pragma unroll
    for (int row = 0; row < kStageRows; row += 16) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ldmatrix_x4_trans(
            a[i], of_dy + place(row + lane / 16 * 8 + lane % 8, (n + 16 * i) / 8 + lane / 8 % 2));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t b[4];
        ldmatrix_x4_trans(
            b, of_x + place(row + lane / 8 % 2 * 8 + lane % 8, (k + 16 * j) / 8 + lane / 16));
        const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_m16n8k16<scalar_t>(d[i][2 * j], a[i], low);
          mma_m16n8k16<scalar_t>(d[i][2 * j + 1], a[i], high);
        }
      }
    }
  }
  float* const out = partials + static_cast<int64_t>(blockIdx.z) * N * K;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = n0 + n + 16 * i + lane / 4 + 8 * half;
        const int column = k0 + k + 8 * j + lane % 4 * 2;
        if (row < N && column < K)
          store_vec(out + static_cast<int64_t>(row) * K + column,
                    Vec<float, 2>{d[i][j][2 * half], d[i][j][2 * half + 1]});
      }
}

extern "C" __global__ void weight_gradient(const float* partials, float* out, int count,
                                           int shares) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int j = 0; j < shares; ++j) sum += partials[static_cast<int64_t>(j) * count + i];
  out[i] = sum;
}
