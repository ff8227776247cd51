// gemm_sm90.cu with LoRA adapters: a product of low rank, of the adapter of each row, is added to
// the sums before the activation.
//
//   out = activation(x weight^T + b[s] h + adapter_bias[s] + bias) + residual
//
// Arguments: GemmAdaptedSm90Params, below.
//
// Numerics: see gemm_sm90.cu and gemm/low_rank.cuh.
// Parallelisation: see gemm_sm90.cu. Each consumer warp multiplies its 16 rows by the columns of b
// that belong to its columns of out, adapter by adapter, with mma.sync on its sums in registers.
// Mirror: engine/reference/gemm.py, after engine/reference/lora_expand.py
#include "gemm/gemm_body_sm90.cuh"

// Fields without a comment: see GemmSm90Params.
struct GemmAdaptedSm90Params {
  TensorMap map_x;
  TensorMap map_tail;
  TensorMap map_w;
  TensorMap map_out;
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

extern "C" __global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_adapted_sm90(const __grid_constant__ GemmAdaptedSm90Params p) {
  gemm_sm90(p, low_rank_of(p));
}
