// Products of the scan: a warp's 16 rows, held in registers, times a tile of 64 tokens
// (gated_delta_tile.cuh). Sums and operands have mma_m16n8k16's layout (common/mma.cuh), sums[n]
// being those of columns 8 n to 8 n + 7. This is the form with mma.sync; that with wgmma, for
// Hopper, has the same functions.
#pragma once

#include "common/mma_operands.cuh"
#include "gated_delta/gated_delta_tile.cuh"

constexpr int kTokenTiles = kChunkTokens / 8, kTokenSteps = kChunkTokens / 16;
constexpr int kKeyTiles = kKeyDim / 8, kKeySteps = kKeyDim / 16;

// Sums, rounded and packed, are the operand of a product over their columns.
template <int kSteps>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[kSteps][4],
                                             const float (&sums)[2 * kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float* const pair = sums[2 * step + part / 2] + part % 2 * 2;
      a[step][part] = pack2<scalar_t>(pair[0], pair[1]);
    }
}

struct MmaProducts {
  // sums = A B^T; the tile's rows are B's.
  static __device__ __forceinline__ void multiply_rows(float (&sums)[kTokenTiles][4],
                                                       const uint32_t (&a)[kKeySteps][4],
                                                       uint32_t tile) {
    clear(sums);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
#pragma unroll
      for (int n = 0; n < kTokenSteps; ++n) {
        uint32_t b[4];
        ldmatrix_x4(b, rows_address(tile, n, step));
        multiply(sums[2 * n], sums[2 * n + 1], a[step], b);
      }
  }

  // sums = A L^T, or += if kAccumulate; L is lower triangular.
  template <bool kAccumulate>
  static __device__ __forceinline__ void multiply_triangle(float (&sums)[kTokenTiles][4],
                                                           const uint32_t (&a)[kTokenSteps][4],
                                                           uint32_t tile) {
    if (!kAccumulate) clear(sums);
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step)
#pragma unroll
      for (int n = step; n < kTokenSteps; ++n) {
        uint32_t b[4];
        ldmatrix_x4(b, rows_address(tile, n, step));
        multiply(sums[2 * n], sums[2 * n + 1], a[step], b);
      }
  }

  // sums += A B; the tile's rows are those of B, one per token.
  static __device__ __forceinline__ void multiply_columns(float (&sums)[kKeyTiles][4],
                                                          const uint32_t (&a)[kTokenSteps][4],
                                                          uint32_t tile) {
    const int row = lane_idx() % 16, column = lane_idx() / 16 * kVec;
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step)
#pragma unroll
      for (int n = 0; n < kKeySteps; ++n) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, tile_address(tile, step * 16 + row, n * 16 + column));
        multiply(sums[2 * n], sums[2 * n + 1], a[step], b);
      }
  }

  // Products are complete when their function returns: nothing to order or await.
  static __device__ __forceinline__ void begin() {}
  static __device__ __forceinline__ void commit() {}
  template <int kPending, int kTiles>
  static __device__ __forceinline__ void wait(float (&)[kTiles][4]) {}

  // Stores 16 columns of sums, packed (pack_operand), as 16 rows of a tile: sums of feature f and
  // token t go to row t, column f.
  static __device__ __forceinline__ void store_transposed(unsigned char* tile, int token,
                                                          int feature,
                                                          const uint32_t (&values)[4]) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int row = token + part / 2 * 8 + lane_idx() / 4;
      const uint32_t to = tile_address(0, row, feature + part % 2 * 8) + lane_idx() % 4 * 4;
      *reinterpret_cast<uint32_t*>(tile + to) = movmatrix(values[part]);
    }
  }

 private:
  // The lane's ldmatrix address for rows [16 n, 16 n + 16) and columns [16 step, 16 step + 16).
  static __device__ __forceinline__ uint32_t rows_address(uint32_t tile, int n, int step) {
    return tile_address(tile, n * 16 + lane_idx() / 16 * 8 + lane_idx() % 8,
                        step * 16 + lane_idx() / 8 % 2 * 8);
  }

  static __device__ __forceinline__ void clear(float (&sums)[kTokenTiles][4]) {
#pragma unroll
    for (auto& tile : sums)
#pragma unroll
      for (float& sum : tile) sum = 0.0f;
  }
};
