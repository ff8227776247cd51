// The scan's products (gated_delta_products.cuh) with wgmma: a warpgroup's 64 rows, 16 per warp,
// share the tile.
#pragma once

#include "common/attention_sm90.cuh"
#include "common/mbarrier.cuh"
#include "common/wgmma_weights.cuh"
#include "gated_delta/gated_delta_products.cuh"

struct WgmmaProducts {
  static __device__ __forceinline__ void multiply_rows(float (&sums)[kTokenTiles][4],
                                                       const uint32_t (&a)[kKeySteps][4],
                                                       uint32_t tile) {
    const uint64_t b = wgmma_descriptor(tile);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
      wgmma_weights<kChunkTokens>(
          flat(sums), a[step], b + step / 4 * (kPanelBytes / 16) + step % 4 * kStepUnits, step > 0);
  }

  template <bool kAccumulate>
  static __device__ __forceinline__ void multiply_triangle(float (&sums)[kTokenTiles][4],
                                                           const uint32_t (&a)[kTokenSteps][4],
                                                           uint32_t tile) {
    // All columns: ptxas serialises wgmmas whose sums are parts of others'.
    const uint64_t b = wgmma_descriptor(tile);
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step)
      wgmma_weights<kChunkTokens>(flat(sums), a[step], b + step * kStepUnits,
                                  kAccumulate || step > 0);
  }

  static __device__ __forceinline__ void multiply_columns(float (&sums)[kKeyTiles][4],
                                                          const uint32_t (&a)[kTokenSteps][4],
                                                          uint32_t tile) {
    const uint64_t b = wgmma_descriptor_transposed(tile, kPanelBytes);
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step)
      wgmma_transposed<kKeyDim>(flat(sums), a[step], b + step * kRowUnits);
  }

  // Before the first product after its registers have changed.
  static __device__ __forceinline__ void begin() { wgmma_fence(); }
  static __device__ __forceinline__ void commit() { wgmma_commit(); }
  // Waits for the sums: until at most kPending later groups are still running.
  template <int kPending, int kTiles>
  static __device__ __forceinline__ void wait(float (&sums)[kTiles][4]) {
    wgmma_wait<kPending>();
    wgmma_pin(flat(sums));
  }

  static __device__ __forceinline__ void store_transposed(unsigned char* tile, int token,
                                                          int feature,
                                                          const uint32_t (&values)[4]) {
    const int matrix = lane_idx() / 8;
    stmatrix_x4_transposed(tile_address(smem_address(tile), token + matrix / 2 * 8 + lane_idx() % 8,
                                        feature + matrix % 2 * 8),
                           values[0], values[1], values[2], values[3]);
  }

 private:
  // In a descriptor's units of 16 bytes: 16 columns of a row, and 16 rows.
  static constexpr int kStepUnits = 2, kRowUnits = 16 * kSwizzleRowBytes / 16;

  // Sums as wgmma's accumulators.
  template <int kTiles>
  static __device__ __forceinline__ float (&flat(float (&sums)[kTiles][4]))[4 * kTiles] {
    return reinterpret_cast<float (&)[4 * kTiles]>(sums);
  }
};
