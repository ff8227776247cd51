// A warp's product in gemm_wna16_stream_sm90.cu: weights are scaled and rounded to scalar_t, and a
// part of k is summed in ascending steps of 16.
#pragma once

#include "common/few_rows.cuh"
#include "common/mma.cuh"
#include "common/weight_fragments.cuh"
#include "gemm_wna16/gemm_wna16_few_rows_block.cuh"

#if ENGINE_DTYPE != 0

template <typename Shape>
struct RoundedProduct {
  static constexpr int kTokenTiles = Shape::kTokenTiles;
  float sums[kTokenTiles][4];  // rows g and g + 8, tokens 2t and 2t + 1
  RowScales scales;
  SuperFactors factors;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = 0.0f;
  }

  // Multiplies 16 columns of a stage, from `column` on: step s of their tile.
  template <int s>
  __device__ __forceinline__ void step(const TileWords& words, int column,
                                       const unsigned char* scales_at,
                                       const uint32_t (&x)[kTokenTiles][4]) {
    if (column % kGroup == 0) {
      const unsigned char* from = scales_at + column / kGroup * kScaleTileBytes;
      scales.set(load_small<kScaleBytes>(from), factors);
    }
    uint32_t a[4];
    decode_weights<s, false>(words, scales, a);
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
      mma_m16n8k16<scalar_t>(sums[i], a, {x[i][s % 2 * 2], x[i][s % 2 * 2 + 1]});
  }

  template <int s>
  __device__ __forceinline__ void two_steps(const TileWords& words, int tile,
                                            const unsigned char* scales_at,
                                            const uint32_t (&x_at)[kTokenTiles]) {
    const int column = tile * kTileColumns + s * 16;
    uint32_t x[kTokenTiles][4];
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) ldmatrix_x4(x[i], x_at[i] + column * 2);
    step<s>(words, column, scales_at, x);
    step<s + 1>(words, column + 16, scales_at, x);
  }

  // With kIsWhole the range is the whole stage, and the code has no branches.
  template <bool kIsWhole>
  __device__ __forceinline__ void multiply_tiles(const unsigned char* stage, int begin, int end,
                                                 const uint32_t (&x_at)[kTokenTiles],
                                                 int lane_idx) {
    const int g = lane_idx / 4;
    const unsigned char* scales_at = stage + kScalesAt + g * kScaleBytes;
    if constexpr (kSuperBlock > 0)
      factors = SuperFactors(load_small<kSuperBytes>(stage + kSupersAt + g * kSuperBytes));
#pragma unroll
    for (int tile = 0; tile < kStageTiles; ++tile) {
      if (!kIsWhole && (tile < begin || tile >= end)) continue;
      TileWords words;
      words.load(stage + tile * kDataBytes, stage + kHighAt + tile * kHighBytes, lane_idx);
      two_steps<0>(words, tile, scales_at, x_at);
      two_steps<2>(words, tile, scales_at, x_at);
    }
  }

  // Accumulates tiles `begin` to `end` - 1 of a stage, clipped to those it has.
  __device__ __forceinline__ void multiply(const unsigned char* stage, int begin, int end,
                                           const uint32_t (&x_at)[kTokenTiles], int lane_idx) {
    if (kStageTiles <= kPartTiles || (begin <= 0 && end >= kStageTiles))
      multiply_tiles<true>(stage, 0, kStageTiles, x_at, lane_idx);
    else
      multiply_tiles<false>(stage, begin, end, x_at, lane_idx);
  }

  // Stores this warp's sums as [token][row]; the sums of the parts are added later.
  __device__ __forceinline__ void store(float* to, int g, int t) const {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = i * 8 + 2 * t + j % 2;
        if (token < Shape::kTokens)
          to[token * Shape::kPitch + g + j / 2 * 8] = sums[i][j] * kWeightDivisor;
      }
  }
};

#endif
