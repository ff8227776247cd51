// Kernel of gemm_fp8_adapted_sm90.cu and gemm_int8_adapted_sm90.cu: w8_sm90.cuh with LoRA adapters,
// whose product of low rank is added to the scaled sums.
#pragma once

#include "gemm/w8_body_sm90.cuh"

// Fields without a comment: see GemmW8Sm90Params.
struct GemmW8AdaptedSm90Params {
  TensorMap map_x;
  TensorMap map_tail;
  TensorMap map_w;
  TensorMap map_out;
  const float* x_scales;
  const float* weight_scales;
  const scalar_t* bias;
  const void* residual;
  int64_t residual_stride;
  void* out;
  int64_t out_stride;
  int m, n, k;
  int band;
  int x_part, tail_part;
  int stages;
  int uses_pdl;
  int num_gates;
  int activation;
  int is_float;
  int out_vector;
  // The adapters of the rows; see LowRank.
  const float* h;
  const scalar_t* b;
  const scalar_t* adapter_bias;
  const int* has_bias;
  const int* slots;
  int num_splits, num_adapters, rank, h_columns;
  int bound0, bound1, bound2, bound3, bound4, bound5, bound6, bound7;
};

#define ENGINE_GEMM_W8_ADAPTED_SM90(name)                                                        \
  extern "C" __global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1) \
      name(const __grid_constant__ GemmW8AdaptedSm90Params p) {                                  \
    gemm_w8_sm90(p, low_rank_of(p));                                                             \
  }
