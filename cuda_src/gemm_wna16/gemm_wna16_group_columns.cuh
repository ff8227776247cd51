// Multiplies a stage by up to four rows of x: the columns of mma.sync's operand B are pairs of a
// group and a row of x.
//
// A round is eight columns: 8 / kRows groups, with column c holding row c % kRows of x in the
// round's group c / kRows. A group's products are its own columns of the accumulators, and lanes
// 4 g + c / 2 hold column c. So each lane scales two columns a round. With x of eight rows in all
// columns (weight_product.cuh) every lane scales every group, which takes more instructions than
// the products if groups are short.
#pragma once

#include "common/mma.cuh"
#include "common/weight_stage.cuh"
#include "gemm_wna16/gemm_wna16_few_rows_x.cuh"

#if ENGINE_DTYPE != 0

template <typename Shape>
struct GroupColumnsProduct {
  static constexpr int kRows = Shape::kTokens;    // rows of x: 1, 2 or 4
  static constexpr int kSteps = kGroup / 16;      // steps of 16 values of k in a group
  static constexpr int kRoundGroups = 8 / kRows;  // groups of a round
  static constexpr int kRoundSteps = kRoundGroups * kSteps;
  static constexpr int kSums = kRows == 1 ? 1 : 2;  // rows of x that a lane has columns of

  float total[kSums][2];  // sums over this lane's columns: rows g and g + 8 of the weight

  using Sums = float[kSums][2];

  // Byte offset in x of the address that a lane passes to ldmatrix. Of the matrices, 2 i + j holds
  // half j of step i % kSteps of round i / kSteps. Rows of x that do not exist are the last one.
  __device__ __forceinline__ static int x_offset(int lane_idx, int x_pitch, int m) {
    const int i = lane_idx / 16, column = lane_idx % 8;
    const int group = i / kSteps * kRoundGroups + column / kRows;
    return min(column % kRows, m - 1) * x_pitch +
           (group * kGroup + i % kSteps * 16 + lane_idx / 8 % 2 * 8) * 2;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i][0] = total[i][1] = 0.0f;
  }

  // Accumulates one stage. `x_at` is this lane's address for ldmatrix; `x_sums` points to the sums
  // of x over the stage's first group.
  __device__ __forceinline__ void multiply(const unsigned char* stage, const float* x_sums,
                                           const uint32_t (&x_at)[1], int lane_idx) {
    const int g = lane_idx / 4, t = lane_idx % 4;
    uint32_t x[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) ldmatrix_x4(x[i], x_at[0] + i * 64 * kRoundGroups);
    Sums sum = {}, minimum = {};
    float own[2][2];  // products of columns 2t and 2t + 1, rows g and g + 8
    float acc[4];     // sums over the current group
#pragma unroll
    for (int tile = 0; tile < kStageTiles; ++tile) {
      TileWords words;
      words.load(stage + tile * kDataBytes, stage + kHighAt + tile * kHighBytes, lane_idx);
      const auto finish_round = [&](int step) {
        if ((step + 1) % kRoundSteps == 0)
          add_round(stage, x_sums, step / kRoundSteps, g, t, own, sum,
                    kSuperBlock > 0 ? minimum : sum);
      };
      multiply_step<0>(words, tile * 4, t, x, acc, own);
      finish_round(tile * 4);
      multiply_step<1>(words, tile * 4 + 1, t, x, acc, own);
      finish_round(tile * 4 + 1);
      multiply_step<2>(words, tile * 4 + 2, t, x, acc, own);
      finish_round(tile * 4 + 2);
      multiply_step<3>(words, tile * 4 + 3, t, x, acc, own);
      finish_round(tile * 4 + 3);
    }
    finish_stage(stage, g, sum, minimum);
  }

  // Stores this warp's sums as [token][row], for reduction with the other warps of the same rows.
  __device__ __forceinline__ void store(float* sums, int g, int t) const {
    constexpr int kLanes = kRows == 4 ? 2 : 1;  // lanes with different rows of x
#pragma unroll
    for (int i = 0; i < kSums; ++i)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float sum = total[i][row];
#pragma unroll
        for (int lanes = kLanes; lanes < 4; lanes *= 2)
          sum += __shfl_xor_sync(kFullMask, sum, lanes);
        if (t < kLanes) sums[(2 * t + i) * Shape::kPitch + g + 8 * row] = sum;
      }
  }

 private:
  // Multiplies step s of a tile, number `step` of the stage; at the end of a group the lanes that
  // own its columns keep the products.
  template <int s>
  __device__ __forceinline__ static void multiply_step(const TileWords& words, int step, int t,
                                                       const uint32_t (&x)[kRows][4],
                                                       float (&acc)[4], float (&own)[2][2]) {
    const int i = step / kRoundSteps * kSteps + step % kSteps;  // pair of matrices in x
    const int group = step % kRoundSteps / kSteps;
    if (step % kSteps == 0) acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
    uint32_t a[4];
    decode_biased<s>(words, a);
    mma_m16n8k16<scalar_t>(acc, a, {x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]});
    const bool is_owner = kRows == 1 ? group / 2 == t : t * 2 / kRows == group;
    if ((step + 1) % kSteps != 0 || !is_owner) return;
#pragma unroll
    for (int column = 0; column < 2; ++column)
      if (kRows > 1 || column == group % 2)
        own[column][0] = acc[column], own[column][1] = acc[2 + column];
  }

  // Adds a round's products, scaled, to the sums of rows g and g + 8.
  __device__ __forceinline__ static void add_round(const unsigned char* stage, const float* x_sums,
                                                   int round, int g, int t,
                                                   const float (&own)[2][2], Sums& sum,
                                                   Sums& minimum) {
    const auto x_sum = load_vec<float, 2>(x_sums + round * 8 + 2 * t);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int group = round * kRoundGroups + (2 * t + column) / kRows;
      const unsigned char* at = stage + kScalesAt + group * kScaleTileBytes + g * kScaleBytes;
      const GroupScales scales(load_small<kScaleBytes>(at));
      const int i = column % kSums;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float bias = kHasZeroPoint ? kBias + scales.offset[row] : kBias;
        sum[i][row] =
            fmaf(scales.scale[row], fmaf(-bias, x_sum.v[column], own[column][row]), sum[i][row]);
        if constexpr (kHasMinimum)
          minimum[i][row] = fmaf(scales.offset[row], x_sum.v[column], minimum[i][row]);
      }
    }
  }

  __device__ __forceinline__ void finish_stage(const unsigned char* stage, int g, const Sums& sum,
                                               const Sums& minimum) {
    GroupScales factors;
    if constexpr (kSuperBlock > 0)
      factors = GroupScales::of_super(load_small<kSuperBytes>(stage + kSupersAt + g * kSuperBytes));
#pragma unroll
    for (int i = 0; i < kSums; ++i)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float& all = total[i][row];
        if constexpr (kSuperBlock == 0) {
          all += sum[i][row];
        } else {
          all = fmaf(factors.scale[row], sum[i][row], all);
          if constexpr (kHasMinimum) all = fmaf(factors.offset[row], minimum[i][row], all);
        }
      }
  }
};

#endif
