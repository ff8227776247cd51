// Multiplies a stage by one row of x whose groups are the columns of mma.sync's operand B.
//
// Column c of B is x of group c (of eight), so a group's product is column c of the accumulators.
// Lanes 4 g + c / 2 hold it: each lane scales two groups of its rows, and the lanes' sums are added
// at the end. With x in all columns (weight_product.cuh) every lane scales every group, which takes
// more instructions than the products if groups are short.
#pragma once

#include "common/mma.cuh"
#include "common/weight_stage.cuh"
#include "gemm_wna16/gemm_wna16_few_rows_x.cuh"

#if ENGINE_DTYPE != 0

template <typename Shape>
struct OneRowProduct {
  static constexpr int kSteps = kGroup / 16;            // steps of 16 columns in a group
  static constexpr int kRounds = kGroup == 16 ? 2 : 1;  // rounds of eight groups in a stage
  static constexpr int kRoundTiles = kStageTiles / kRounds;

  float total[2];  // sums over this lane's groups: rows g and g + 8

  // Byte offset in x of the address that a lane passes to ldmatrix: matrix 2 i + j holds half j of
  // step i % kSteps of round i / kSteps, a row per group.
  __device__ __forceinline__ static int x_offset(int lane_idx) {
    const int i = lane_idx / 16, group = i / kSteps * 8 + lane_idx % 8;
    return (group * kGroup + i % kSteps * 16 + lane_idx / 8 % 2 * 8) * 2;
  }

  __device__ __forceinline__ void clear() { total[0] = total[1] = 0.0f; }

  // Accumulates one stage. `x_at` is this lane's address for ldmatrix; `x_sums` points to the
  // stage's first group.
  __device__ __forceinline__ void multiply(const unsigned char* stage, const float* x_sums,
                                           const uint32_t (&x_at)[1], int lane_idx) {
    const int g = lane_idx / 4, t = lane_idx % 4;
    uint32_t x[4];
    ldmatrix_x4(x, x_at[0]);
    float sum[2] = {}, minimum[2] = {};
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      float own[2][2];  // products of groups 2t and 2t + 1, rows g and g + 8
      float acc[4];     // sums over the current group
#pragma unroll
      for (int i = 0; i < kRoundTiles; ++i) {
        const int tile = round * kRoundTiles + i;
        TileWords words;
        words.load(stage + tile * kDataBytes, stage + kHighAt + tile * kHighBytes, lane_idx);
        step<0>(words, round, i, t, x, acc, own);
        step<1>(words, round, i, t, x, acc, own);
        step<2>(words, round, i, t, x, acc, own);
        step<3>(words, round, i, t, x, acc, own);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int group = round * 8 + 2 * t + i;
        const unsigned char* at = stage + kScalesAt + group * kScaleTileBytes + g * kScaleBytes;
        add_group(at, x_sums[group], own[i], sum, kSuperBlock > 0 ? minimum : sum);
      }
    }
    finish_stage(stage, g, sum, minimum);
  }

  // Stores this warp's sums, for reduction with the other warps of the same rows.
  __device__ __forceinline__ void store(float* sums, int g, int t) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum = total[row];
      sum += __shfl_xor_sync(kFullMask, sum, 1);
      sum += __shfl_xor_sync(kFullMask, sum, 2);
      if (t == 0) sums[g + 8 * row] = sum;
    }
  }

 private:
  // Multiplies step s of a round's tile `tile`; at the end of a group its lanes keep the product.
  template <int s>
  __device__ __forceinline__ static void step(const TileWords& words, int round, int tile, int t,
                                              const uint32_t (&x)[4], float (&acc)[4],
                                              float (&own)[2][2]) {
    const int index = tile * 4 + s;  // step within the round
    const int i = round + index % kSteps, group = index / kSteps;
    if (index % kSteps == 0) acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
    uint32_t a[4];
    decode_biased<s>(words, a);
    mma_m16n8k16<scalar_t>(acc, a, {x[2 * i], x[2 * i + 1]});
    if ((index + 1) % kSteps == 0 && group / 2 == t)
      own[group % 2][0] = acc[group % 2], own[group % 2][1] = acc[2 + group % 2];
  }

  // Adds a group's product, scaled, to the sums of rows g and g + 8.
  __device__ __forceinline__ static void add_group(const unsigned char* scales_at, float x_sum,
                                                   const float (&product)[2], float (&sum)[2],
                                                   float (&minimum)[2]) {
    const GroupScales scales(load_small<kScaleBytes>(scales_at));
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float bias = kHasZeroPoint ? kBias + scales.offset[row] : kBias;
      sum[row] = fmaf(scales.scale[row], fmaf(-bias, x_sum, product[row]), sum[row]);
      if constexpr (kHasMinimum) minimum[row] = fmaf(scales.offset[row], x_sum, minimum[row]);
    }
  }

  __device__ __forceinline__ void finish_stage(const unsigned char* stage, int g,
                                               const float (&sum)[2], const float (&minimum)[2]) {
    GroupScales factors;
    if constexpr (kSuperBlock > 0)
      factors = GroupScales::of_super(load_small<kSuperBytes>(stage + kSupersAt + g * kSuperBytes));
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if constexpr (kSuperBlock == 0) {
        total[row] += sum[row];
      } else {
        total[row] = fmaf(factors.scale[row], sum[row], total[row]);
        if constexpr (kHasMinimum) total[row] = fmaf(factors.offset[row], minimum[row], total[row]);
      }
    }
  }
};

#endif
