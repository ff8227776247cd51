// out = a b^T on tensor cores, for every chip from sm_80 on: cp.async fills a ring of stages in
// shared memory, ldmatrix loads fragments from there to registers, mma.sync multiplies them.
//
// A block computes 128 x 256 outputs with eight warps of 64 x 64. Fragments of the next 16 values
// of k are loaded while the present ones are multiplied.
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/swizzle.cuh"

constexpr int kTileM = 128, kTileN = 256;  // outputs per block
constexpr int kTileK = 64;                 // values of k per stage: rows of 128 bytes
constexpr int kWarp = 64;                  // rows and columns of out per warp
constexpr int kThreads = kTileM / kWarp * (kTileN / kWarp) * kWarpSize;
constexpr int kStages = STAGES;  // as many as fit, chosen at launch
constexpr int kRowBytes = kSwizzleRowBytes, kChunks = 8;
constexpr int kBytesA = kTileM * kRowBytes, kStageBytes = (kTileM + kTileN) * kRowBytes;

// Starts copies of kRows rows of a matrix, kTileK values each; zeros outside the matrix.
template <int kRows>
__device__ __forceinline__ void load_tile(uint32_t smem, const scalar_t* matrix, int row0, int rows,
                                          int k, int K) {
  constexpr int kStep = kThreads / kChunks;  // rows that all threads copy at once
  const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
  const int column = k + chunk * kVec;
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
    const bool exists = row0 + row + i < rows && column < K;
    const int64_t offset = static_cast<int64_t>(row0 + row + i) * K + column;
    cp_async_16(smem + swizzle_128b(row + i, chunk), matrix + (exists ? offset : 0), exists);
  }
}

// Fragments of a warp for 16 values of k.
struct Fragments {
  uint32_t a[kWarp / 16][4];
  uint32_t b[kWarp / 16][4];  // two columns of eight in each

  // `step`: which 16 of the stage's values of k. See mma.cuh for the order of the matrices.
  __device__ __forceinline__ void load(uint32_t smem_a, uint32_t smem_b, int step) {
    const int lane_idx = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kWarp / 16; ++i) {
      const int row = i * 16 + lane_idx % 16;
      ldmatrix_x4(a[i], smem_a + swizzle_128b(row, step * 2 + lane_idx / 16));
    }
#pragma unroll
    for (int j = 0; j < kWarp / 16; ++j) {
      const int row = j * 16 + lane_idx % 8 + lane_idx / 16 * 8;
      ldmatrix_x4(b[j], smem_b + swizzle_128b(row, step * 2 + lane_idx / 8 % 2));
    }
  }
};

using Sums = float[kWarp / 16][kWarp / 8][4];

__device__ __forceinline__ void multiply(Sums& acc, const Fragments& f) {
#pragma unroll
  for (int i = 0; i < kWarp / 16; ++i)
#pragma unroll
    for (int j = 0; j < kWarp / 8; ++j) {
      const uint32_t b[2] = {f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]};
      mma_m16n8k16<scalar_t>(acc[i][j], f.a[i], b);
    }
}

// a, b and out: 16-byte aligned; K a multiple of 8, N even. Dynamic shared memory: the ring.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    product_mma(const scalar_t* a, const scalar_t* b, scalar_t* out, int M, int N, int K) {
  extern __shared__ __align__(128) unsigned char smem[];
  const uint32_t ring = smem_address(smem);
  const int row0 = blockIdx.x * kTileM, col0 = blockIdx.y * kTileN;
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  const int warp_row = warp_idx % (kTileM / kWarp) * kWarp;
  const int warp_col = warp_idx / (kTileM / kWarp) * kWarp;
  const int num_tiles = (K + kTileK - 1) / kTileK;

  const auto stage = [&](int tile) { return ring + tile % kStages * kStageBytes; };
  const auto load = [&](int tile) {
    if (tile < num_tiles) {
      load_tile<kTileM>(stage(tile), a, row0, M, tile * kTileK, K);
      load_tile<kTileN>(stage(tile) + kBytesA, b, col0, N, tile * kTileK, K);
    }
    cp_async_commit();  // even if empty: the wait counts groups
  };
  // SAFETY: after the barrier the next tile is visible to all, and no thread reads the one before.
  const auto await_next = [&] {
    cp_async_wait<kStages - 2>();
    __syncthreads();
  };
  Fragments frag[2];
  const auto load_fragments = [&](int tile, int step) {
    frag[step % 2].load(stage(tile) + warp_row * kRowBytes,
                        stage(tile) + kBytesA + warp_col * kRowBytes, step);
  };

  Sums acc = {};
#pragma unroll
  for (int tile = 0; tile < kStages - 1; ++tile) load(tile);
  await_next();
  load_fragments(0, 0);
  for (int tile = 0; tile < num_tiles; ++tile) {
    constexpr int kSteps = kTileK / 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSteps - 1) {
        await_next();
        load_fragments(tile + 1, 0);
      } else {
        load_fragments(tile, step + 1);
      }
      if (step == 0) load(tile + kStages - 1);
      multiply(acc, frag[step % 2]);
    }
  }
  cp_async_wait<0>();

  const int m = row0 + warp_row + lane_idx / 4, n = col0 + warp_col + lane_idx % 4 * 2;
#pragma unroll
  for (int i = 0; i < kWarp / 16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < kWarp / 8; ++j) {
        const int row = m + i * 16 + half * 8, col = n + j * 8;
        if (row >= M || col >= N) continue;
        const uint32_t pair = pack2<scalar_t>(acc[i][j][half * 2], acc[i][j][half * 2 + 1]);
        *reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(row) * N + col) = pair;
      }
}
