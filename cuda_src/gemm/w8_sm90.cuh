// Kernel of gemm_fp8_sm90.cu and gemm_int8_sm90.cu: gemm_sm90.cu with 8-bit operands.
#pragma once

#include "gemm/w8_body_sm90.cuh"

// Fields without a comment: see GemmSm90Params.
struct GemmW8Sm90Params {
  TensorMap map_x;     // x (M, K) codes, contiguous; K is a multiple of 16
  TensorMap map_tail;  // x, box: tail_part rows
  TensorMap map_w;     // weight (N, K) codes
  TensorMap map_out;
  const float* x_scales;       // (M,), or (M, ceil(K / 128)) with groups
  const float* weight_scales;  // (N,), or (ceil(N / 128), ceil(K / 128)) with blocks
  const scalar_t* bias;        // (N,), or null
  const void* residual;
  int64_t residual_stride;
  void* out;
  int64_t out_stride;
  int m, n, k;
  int band;
  int x_part, tail_part;
  int stages;
  int uses_pdl;   // the preceding kernel may still run; it writes no model parameter
  int num_gates;  // a multiple of 64 with blocks
  int activation;
  int is_float;
  int out_vector;  // elements per access of out and residual: 0 one, 1 four, 2 eight
};

#define ENGINE_GEMM_W8_SM90(name)                                                                \
  extern "C" __global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1) \
      name(const __grid_constant__ GemmW8Sm90Params p) {                                         \
    gemm_w8_sm90(p, NoLowRank{});                                                                \
  }
