// GEMM of two 8-bit operands (gemm_fp8, gemm_int8): formula and parameters.
//
//   out[m, n] = activation(sum_k xq[m, k] * weight[n, k] * x_scale * weight_scale + bias[n])
//               + residual[m, n]
//
// xq has one scale per row or, with kGroups, per group of 128 columns of a row, applied to each
// group's sum. The weight has one scale per row or, with kBlocks, per 128 x 128 block; kBlocks
// implies kGroups.
#pragma once

#include "common/codes.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "gemm/gemm_problem.cuh"

constexpr int kScaleBlock = 128;

struct W8Params {
  // (M, K) codes; scalar_t if x_scales is null (only in skinny kernels, for a single row). Rows are
  // x_stride elements apart.
  const void* x;
  int64_t x_stride;
  const float* x_scales;  // (M,), or (M, ceil(K / 128)) with groups; null: the kernel quantizes x
  const unsigned char* weight;  // (N, K) codes, contiguous
  const float* weight_scales;   // (N,), or (ceil(N / 128), ceil(K / 128)) with blocks
  const scalar_t* norm_weight;  // (K,) weight of an RMSNorm before the quantization; null: no norm
  float eps, weight_offset;     // norm parameters
  const scalar_t* bias;         // (N,), or null
  const void* residual;         // shape and dtype of out, rows residual_stride apart; may be out
  int64_t residual_stride;      // elements
  void* out;                    // (M, N), or (M, N / 2) gated; scalar_t, or float if is_float
  int64_t out_stride;           // elements
  int m, n, k;
  int k_per_split;  // skinny: pairs of values of k per warp, a multiple of kStepK
  int num_tiles;    // skinny: tiles of blockDim.z * 16 rows of the weight
  int num_stages;   // skinny: stages of each warp's ring
  int num_gates;    // number of gate rows if they all precede the up rows; else 0
  int activation;   // an Activation
  int is_float;
  int is_vector;  // rows of out and residual can be accessed four elements at a time
  int uses_pdl;   // the preceding kernel may still run; it writes no model parameter
};

__device__ __forceinline__ int scale_blocks(int size) {
  return (size + kScaleBlock - 1) / kScaleBlock;
}

// The mma of each code type: D (16, 8) += A (16, 32) B (32, 8). Fragments are laid out as in
// common/mma.cuh, but a register holds four codes instead of two values.
struct Fp8Product {
  using Codes = E4m3;
  using sum_t = float;
  static constexpr bool kIsFp8 = true;
  static constexpr bool kGroups = false;  // x has groups only if kBlocks
  // Codes are multiplied as __half, which represents each one exactly: sums keep float's precision.
  __device__ __forceinline__ static void mma(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
    uint32_t a_low[4], a_high[4], b_low[2], b_high[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) halves_of_e4m3(a[i], a_low[i], a_high[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) halves_of_e4m3(b[i], b_low[i], b_high[i]);
    const uint32_t a0[4] = {a_low[0], a_low[1], a_high[0], a_high[1]};
    const uint32_t a1[4] = {a_low[2], a_low[3], a_high[2], a_high[3]};
    const uint32_t b0[2] = {b_low[0], b_high[0]}, b1[2] = {b_low[1], b_high[1]};
    mma_m16n8k16<__half>(d, a0, b0);
    mma_m16n8k16<__half>(d, a1, b1);
  }
};

struct Int8Product {
  using Codes = Int8;
  using sum_t = int;
  static constexpr bool kIsFp8 = false;
  static constexpr bool kGroups = true;
  __device__ __forceinline__ static void mma(int (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
