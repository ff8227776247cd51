// Multiplies one stage on tensor cores: the weight is mma.sync's 16-row operand A, tokens are the 8
// columns of B.
//
// Within a group x is multiplied by the codes, which are exact integers; the group's scale then
// multiplies the sum. The codes' bias (weight_decode.cuh), zero points and minimums multiply the
// sum of x over the group. For one token that sum is in shared memory; for more, a product with
// ones computes it in the same accumulator positions.
#pragma once

#include "common/few_rows.cuh"
#include "common/mma.cuh"
#include "common/weight_stage.cuh"

#if ENGINE_DTYPE != 0

template <typename Shape>
struct StageProduct {
  static constexpr int kTokenTiles = Shape::kTokenTiles;
  // This lane's sums: rows g and g + 8, tokens 2t and 2t + 1. With one token, 2t + 1 is omitted.
  static constexpr int kColumns = Shape::kTokens == 1 ? 1 : 2;
  float total[kTokenTiles][2][kColumns];
  // Sums over the current super-block, weighted by its integer scales and by its integer minimums.
  float part[kTokenTiles][2][kColumns], minimums[kTokenTiles][2][kColumns];
  static constexpr bool kMultipliesOnes = kSumsX && Shape::kTokens > 1;
  float acc[kTokenTiles][4];    // sums over the current group
  float x_sum[kTokenTiles][4];  // sums of x over the current group

  using Totals = float[kTokenTiles][2][kColumns];

  __device__ __forceinline__ static void clear(Totals& sums) {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
      for (int j = 0; j < 2 * kColumns; ++j) sums[i][j / kColumns][j % kColumns] = 0.0f;
  }
  __device__ __forceinline__ void clear() { clear(total); }

  __device__ __forceinline__ void start_group() {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] = x_sum[i][j] = 0.0f;
  }

  __device__ __forceinline__ void finish_group(const unsigned char* scales_at,
                                               const float* x_sum_at) {
    const GroupScales scales(load_small<kScaleBytes>(scales_at));
    if constexpr (kSumsX && !kMultipliesOnes) x_sum[0][0] = *x_sum_at;
    Totals& sums = kSuperBlock > 0 ? part : total;
    Totals& low = kSuperBlock > 0 ? minimums : total;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float scale = scales.scale[row];
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          float sum = acc[i][2 * row + j];
          if constexpr (kHasZeroPoint)
            sum = fmaf(-kBias - scales.offset[row], x_sum[i][j], sum);
          else if constexpr (kSumsX && kBias != 0)
            sum = fmaf(-kBias, x_sum[i][j], sum);
          sums[i][row][j] = fmaf(scale, sum, sums[i][row][j]);
          if constexpr (kHasMinimum)
            low[i][row][j] = fmaf(scales.offset[row], x_sum[i][j], low[i][row][j]);
        }
    }
  }

  __device__ __forceinline__ void finish_super_block(const GroupScales& factors) {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
      for (int j = 0; j < 2 * kColumns; ++j) {
        const int row = j / kColumns, column = j % kColumns;
        float& sum = total[i][row][column];
        sum = fmaf(factors.scale[row], part[i][row][column], sum);
        if constexpr (kHasMinimum) sum = fmaf(factors.offset[row], minimums[i][row][column], sum);
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
      if constexpr (kMultipliesOnes) mma_m16n8k16<scalar_t>(x_sum[i], ones, b);
    }
  }

  // Multiplies steps s and s + 1 of tile `tile` of a stage, and finishes the groups that end there.
  // `x_at` is the ldmatrix address of this lane's row; `scales` and `x_sums` point to the stage's
  // first group.
  template <int s>
  __device__ __forceinline__ void two_steps(const TileWords& words, int tile,
                                            const unsigned char* scales, const float* x_sums,
                                            const uint32_t (&x_at)[kTokenTiles]) {
    const int column = tile * kTileColumns + s * 16;
    uint32_t x[kTokenTiles][4];
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) ldmatrix_x4(x[i], x_at[i] + column * 2);
    const auto finish = [&](int at) {
      finish_group(scales + at / kGroup * kScaleTileBytes, x_sums + at / kGroup);
    };
    if (column % kGroup == 0) start_group();
    step<s>(words, x);
    if constexpr (kGroup == 16) {
      finish(column);
      start_group();
    }
    step<s + 1>(words, x);
    if ((column + 32) % kGroup == 0) finish(column + 16);
  }

  // Accumulates one stage.
  __device__ __forceinline__ void multiply(const unsigned char* stage, const float* x_sums,
                                           const uint32_t (&x_at)[kTokenTiles], int lane_idx) {
    const int g = lane_idx / 4;
    const unsigned char* scales = stage + kScalesAt + g * kScaleBytes;
    if constexpr (kSuperBlock > 0) clear(part), clear(minimums);
    // With several tokens, hoisted loads of later tiles would need too many registers.
    constexpr int kUnroll = Shape::kTokens == 1 ? kStageTiles : kGroup > kTileColumns ? 2 : 1;
#pragma unroll kUnroll
    for (int tile = 0; tile < kStageTiles; ++tile) {
      TileWords words;
      words.load(stage + tile * kDataBytes, stage + kHighAt + tile * kHighBytes, lane_idx);
      two_steps<0>(words, tile, scales, x_sums, x_at);
      two_steps<2>(words, tile, scales, x_sums, x_at);
    }
    if constexpr (kSuperBlock > 0) {
      const uint2 super = load_small<kSuperBytes>(stage + kSupersAt + g * kSuperBytes);
      finish_super_block(GroupScales::of_super(super));
    }
  }

  // Stores this warp's sums as [token][row], for reduction with the other warps of the same rows.
  __device__ __forceinline__ void store(float* sums, int g, int t) const {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int token = i * 8 + 2 * t + j;
        if (token >= Shape::kTokens) continue;
        sums[token * Shape::kPitch + g] = total[i][0][j];
        sums[token * Shape::kPitch + g + 8] = total[i][1][j];
      }
  }
};

#endif
