// The problem solved by gemm_wna16's kernels, and its parameters.
//
//   out[m, n] = activation(sum_k x[m, k] * weight[n, k] + bias[n]) + residual[m, n]
//
// Gated (kSiluAndMul): the weight holds all gate rows, then all up rows, and out[m, n] = silu(gate)
// * up has N / 2 columns.
#pragma once

#include "common/epilogue.cuh"
#include "common/weight_format.cuh"

// Parameters of the kernels for few rows of x.
struct FewRowsParams {
  const scalar_t* x;  // (M, K), rows x_stride elements apart, 16-byte aligned
  int64_t x_stride;
  const unsigned char* data;    // planes of the weight; see PackedWeight
  const unsigned char* high;    // or null
  const unsigned char* scales;  //
  const unsigned char* supers;  // or null
  const scalar_t* norm_weight;  // (K,) weight of an RMSNorm on x; null: no norm
  float eps, weight_offset;     // norm parameters
  const scalar_t* bias;         // (N,), or null
  const void* residual;         // shape and dtype of out, rows residual_stride apart; may be out
  int64_t residual_stride;      // elements
  void* out;                    // (M, N), or (M, N / 2) gated; scalar_t, or float if is_float
  int64_t out_stride;           // elements
  int m, n, k;
  int groups, num_supers;  // entries per row of scales and of supers
  int part_stages;         // stages of k per warp
  int num_work_tiles;      // work tiles of blockDim.z row tiles
  int num_stages;          // stages per warp's ring; fewer if k has fewer
  int early_stages;        // stages requested before x, which arrives after them
  int activation;          // an Activation
  int is_float;
  int uses_pdl;  // the preceding kernel may still run; it writes neither weights nor bias
};
