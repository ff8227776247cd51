// Tiled GEMM of codes on tensor cores, for every GPU: cp.async fills a ring of stages, 64 columns
// of k each. A block of four warps computes a 64 x 64 tile of out.
//
// Each element sums k in ascending order, for every m.
#pragma once

#include "common/tile_epilogue.cuh"
#include "common/tile_loader.cuh"
#include "gemm/w8_problem.cuh"

constexpr int kW8Tile = 64, kW8Warp = 32;  // rows and columns per block, per warp
constexpr int kW8Threads = 128, kW8TileStages = 4;
constexpr int kW8TileBytes = kW8Tile * kTileRowBytes;  // bytes per operand and stage
constexpr int kW8Steps = kTileRowBytes / 32;

// Copies 64 rows of codes to shared memory, 64 columns at a time.
template <bool kAligned>
struct CodeLoader {
  const unsigned char* matrix;
  int64_t stride;
  int row0, rows;

  __device__ __forceinline__ void load(unsigned char* smem, int k, int k_end) const {
#pragma unroll
    for (int i = 0; i < kW8Tile * kChunksPerRow / kW8Threads; ++i) {
      const int place = i * kW8Threads + static_cast<int>(threadIdx.x);
      const int row = place / kChunksPerRow, chunk = place % kChunksPerRow;
      const int column = k + chunk * 16;
      const bool has_row = row0 + row < rows;
      const unsigned char* from = matrix + (static_cast<int64_t>(row0) + row) * stride + column;
      unsigned char* to = smem + swizzled(row, chunk);
      if constexpr (kAligned) {
        const bool valid = has_row && column < k_end;
        cp_async_16(to, valid ? from : matrix, valid);
      } else {
        Vec<unsigned char, 16> codes = {};
#pragma unroll
        for (int j = 0; j < 16; ++j)
          if (has_row && column + j < k_end) codes.v[j] = from[j];
        store_vec(to, codes);
      }
    }
  }
};

// A warp's 32 x 32 part of the tile.
template <typename Product, bool kBlocks>
struct W8Core {
  static constexpr bool kGroups = kBlocks || Product::kGroups;
  static constexpr int kTilesM = kW8Warp / 16, kTilesN = kW8Warp / 8;
  static constexpr int kPitch = kW8Warp + 8;  // floats; 8 mod 32: no bank conflicts
  static constexpr int kStagingFloats = 16 * kPitch;
  using sum_t = typename Product::sum_t;

  const W8Params& p;
  int row0, col0;  // first row and column of this warp
  int offset_a, offset_b;
  sum_t acc[kTilesM][kTilesN][4] = {};
  float scaled[kTilesM][kTilesN][4] = {};  // kGroups only: scaled sums of the finished groups

  __device__ __forceinline__ W8Core(const W8Params& p, TileOrigin origin) : p(p) {
    const int lane_idx = threadIdx.x % kWarpSize, warp_idx = threadIdx.x / kWarpSize;
    const int warp_row = warp_idx / 2 * kW8Warp, warp_col = warp_idx % 2 * kW8Warp;
    row0 = origin.row + warp_row, col0 = origin.col + warp_col;
    offset_a = swizzled(warp_row + lane_idx % 16, lane_idx / 16);
    offset_b = swizzled(warp_col + lane_idx % 8 + lane_idx / 16 * 8, lane_idx / 8 % 2);
  }

  __device__ __forceinline__ void multiply(const unsigned char* smem_x,
                                           const unsigned char* smem_w) {
#pragma unroll
    for (int step = 0; step < kW8Steps; ++step) {
      uint32_t a[kTilesM][4], b[kTilesN / 2][4];
#pragma unroll
      for (int i = 0; i < kTilesM; ++i)
        ldmatrix_x4(a[i], smem_x + (offset_a ^ (step * 2 << 4)) + i * 16 * kTileRowBytes);
#pragma unroll
      for (int j = 0; j < kTilesN / 2; ++j)
        ldmatrix_x4(b[j], smem_w + (offset_b ^ (step * 2 << 4)) + j * 16 * kTileRowBytes);
#pragma unroll
      for (int i = 0; i < kTilesM; ++i)
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          const uint32_t pair[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
          Product::mma(acc[i][j], a[i], pair);
        }
    }
  }

  // Row and column of element e of a lane's four.
  __device__ __forceinline__ int row(int i, int e) const {
    return row0 + i * 16 + e / 2 * 8 + static_cast<int>(threadIdx.x) % kWarpSize / 4;
  }
  __device__ __forceinline__ int col(int j, int e) const {
    return col0 + j * 8 + e % 2 + static_cast<int>(threadIdx.x) % 4 * 2;
  }

  // Adds a group's scaled sums to the total, and clears them for the next group.
  __device__ __forceinline__ void close_group(int group) {
    const int blocks = scale_blocks(p.k);
#pragma unroll
    for (int i = 0; i < kTilesM; ++i)
#pragma unroll
      for (int j = 0; j < kTilesN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int m = row(i, e), n = col(j, e);
          if (m < p.m && n < p.n) {
            float scale = p.x_scales[static_cast<int64_t>(m) * blocks + group];
            if constexpr (kBlocks)
              scale *= p.weight_scales[static_cast<int64_t>(n / kScaleBlock) * blocks + group];
            scaled[i][j][e] += static_cast<float>(acc[i][j][e]) * scale;
          }
          acc[i][j][e] = 0;
        }
  }

  __device__ __forceinline__ float result(int i, int j, int e) const {
    if constexpr (kBlocks) return scaled[i][j][e];
    const int m = row(i, e), n = col(j, e);
    if (m >= p.m || n >= p.n) return 0.0f;
    if constexpr (kGroups) return scaled[i][j][e] * p.weight_scales[n];
    return static_cast<float>(acc[i][j][e]) * p.x_scales[m] * p.weight_scales[n];
  }

  __device__ __forceinline__ void store(const Epilogue& e, float* staging) const {
    const int lane_idx = threadIdx.x % kWarpSize;
    float* to = staging + lane_idx / 4 * kPitch + lane_idx % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      __syncwarp();  // SAFETY: all lanes have read the previous slice.
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        store_vec(to + j * 8, Vec<float, 2>{result(i, j, 0), result(i, j, 1)});
        store_vec(to + j * 8 + 8 * kPitch, Vec<float, 2>{result(i, j, 2), result(i, j, 3)});
      }
      __syncwarp();
      using Rows = Slice<kW8Warp, kPitch, kWarpSize>;
      store_slice(e, Rows{staging, lane_idx, row0 + i * 16, col0, p.m, p.n});
    }
  }
};

template <typename Product, bool kBlocks, bool kAligned>
__device__ __forceinline__ void w8_tile(const W8Params& p) {
  __shared__ __align__(128) unsigned char smem[kW8TileStages * 2 * kW8TileBytes];
  pdl_wait();
  const TileOrigin origin = tile_origin<kW8Tile, kW8Tile>(p.m, p.n);
  const CodeLoader<kAligned> x{static_cast<const unsigned char*>(p.x), p.x_stride, origin.row, p.m};
  const CodeLoader<kAligned> weight{p.weight, p.k, origin.col, p.n};
  W8Core<Product, kBlocks> core(p, origin);
  const int num_stages_k = (p.k + kTileRowBytes - 1) / kTileRowBytes;
  const auto stage = [&](int i) { return smem + i % kW8TileStages * 2 * kW8TileBytes; };
  const auto load = [&](int i) {
    if (i < num_stages_k) {
      x.load(stage(i), i * kTileRowBytes, p.k);
      weight.load(stage(i) + kW8TileBytes, i * kTileRowBytes, p.k);
    }
    cp_async_commit();  // even if empty: the wait counts groups
  };
#pragma unroll
  for (int i = 0; i < kW8TileStages - 1; ++i) load(i);
#pragma unroll 1
  for (int i = 0; i < num_stages_k; ++i) {
    cp_async_wait<kW8TileStages - 2>();
    __syncthreads();  // SAFETY: all warps see the stage, and have read the one that is filled next.
    load(i + kW8TileStages - 1);
    core.multiply(stage(i), stage(i) + kW8TileBytes);
    if constexpr (W8Core<Product, kBlocks>::kGroups)
      if (i % 2 == 1 || i + 1 == num_stages_k) core.close_group(i / 2);
  }
  cp_async_wait<0>();
  __syncthreads();  // SAFETY: the stages are reused as staging of the epilogue.
  const Epilogue epilogue{p.bias,       p.residual,   p.out,           p.residual_stride,
                          p.out_stride, p.activation, p.is_float != 0, p.is_vector != 0};
  constexpr int kStagingFloats = W8Core<Product, kBlocks>::kStagingFloats;
  core.store(epilogue, reinterpret_cast<float*>(smem) + threadIdx.x / kWarpSize * kStagingFloats);
}

// Defines a product's entry points `op_name`.
#define ENGINE_W8_TILE(name, ...)                          \
  extern "C" __global__ void __launch_bounds__(kW8Threads) \
      name(const __grid_constant__ W8Params p) {           \
    __VA_ARGS__(p);                                        \
  }
