// Products of a stage on tensor cores: the weight is the 16-row operand of mma.sync, tokens are its
// 8 columns.
//
// Sums over a group are of codes, exact integers; the group's scale multiplies the sum. What codes
// have too much (decode.cuh), zero points and minimums multiply the sum of x over the group, which
// a product with ones gives in the same place of the accumulators.
#pragma once

#include "common/mma.cuh"
#include "gemm_wna16/decode.cuh"
#include "gemm_wna16/few_rows_block.cuh"

#if ENGINE_DTYPE != 0

// Short groups subtract in the codes: that takes fewer instructions.
constexpr bool kSumsX = kIsPaired || (kCodeBias != 0 && kGroup > 16);
constexpr int kBias = kCodeBias + kZero;

template <int kTokenTiles>
struct StageProduct {
  float total[kTokenTiles][4];  // of this lane: rows g, g + 8 by tokens 2t, 2t + 1
  float acc[kTokenTiles][4];    // of the group
  float x_sum[kTokenTiles][4];  // of x over the group

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i][j] = 0.0f;
  }

  __device__ __forceinline__ void start_group() {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] = x_sum[i][j] = 0.0f;
  }

  __device__ __forceinline__ void finish_group(const GroupScales& scales) {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float scale = scales.scale[j / 2], offset = scales.offset[j / 2];
        float sum = acc[i][j];
        if constexpr (kHasZeroPoint)
          sum = fmaf(-(offset + kBias), x_sum[i][j % 2], sum);
        else if constexpr (kSumsX && kBias != 0)
          sum = fmaf(-kBias, x_sum[i][j % 2], sum);
        total[i][j] = fmaf(scale, sum, total[i][j]);
        if constexpr (kHasMinimum) total[i][j] = fmaf(offset, x_sum[i][j % 2], total[i][j]);
      }
  }

  template <int s>
  __device__ __forceinline__ void step(const TileWords& words,
                                       const uint32_t (&x)[kTokenTiles][4]) {
    uint32_t a[4];
    if constexpr (kSumsX)
      decode_biased<s>(words, a);
    else
      decode<s>(words, a);
    const uint32_t ones[4] = {pair_of(1), pair_of(1), pair_of(1), pair_of(1)};
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const uint32_t b[2] = {x[i][s % 2 * 2], x[i][s % 2 * 2 + 1]};
      mma_m16n8k16<scalar_t>(acc[i], a, b);
      if constexpr (kSumsX) mma_m16n8k16<scalar_t>(x_sum[i], ones, b);
    }
  }

  // Steps s and s + 1 of a tile. `scales` are those of the first of the groups that end here or
  // later, `column` counts from its first; `x_rows` is where this lane's row of ldmatrix begins.
  template <int s>
  __device__ __forceinline__ void two_steps(const TileWords& words, const unsigned char* scales,
                                            int column, const uint32_t (&x_rows)[kTokenTiles],
                                            uint2 super) {
    uint32_t x[kTokenTiles][4];
    const int first = column + s * 16;
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) ldmatrix_x4(x[i], x_rows[i] + first * 2);
    const auto scales_of = [&](int at) {
      return GroupScales(load_small<kScaleBytes>(scales + at / kGroup * kScaleTileBytes), super);
    };
    if (first % kGroup == 0) start_group();
    step<s>(words, x);
    if constexpr (kGroup == 16) {
      finish_group(scales_of(first));
      start_group();
    }
    step<s + 1>(words, x);
    if ((first + 32) % kGroup == 0) finish_group(scales_of(first + 16));
  }

  __device__ __forceinline__ void multiply(const unsigned char* stage,
                                           uint32_t (&x_rows)[kTokenTiles], int lane_idx) {
    const int g = lane_idx / 4;
    const uint2 super = load_small<kSuperBytes>(stage + kSupersAt + g * kSuperBytes);
    // Unrolled, loads of later tiles would take too many registers.
    constexpr int kTiles = kGroup > kTileColumns ? kGroup / kTileColumns : 1;
#pragma unroll 1
    for (int first = 0; first < kStageTiles; first += kTiles) {
      const unsigned char* scales =
          stage + kScalesAt + g * kScaleBytes + first * kTileColumns / kGroup * kScaleTileBytes;
#pragma unroll
      for (int c = 0; c < kTiles; ++c) {
        TileWords words;
        words.load(stage + (first + c) * kDataBytes, stage + kHighAt + (first + c) * kHighBytes,
                   lane_idx);
        two_steps<0>(words, scales, c * kTileColumns, x_rows, super);
        two_steps<2>(words, scales, c * kTileColumns, x_rows, super);
      }
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) x_rows[i] += kTiles * kTileColumns * 2;
    }
  }
};

#endif
