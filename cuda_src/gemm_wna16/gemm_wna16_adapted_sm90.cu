// gemm_wna16_sm90.cu with LoRA adapters: a product of low rank, of the adapter of each row of x, is
// added to the sums before the activation.
//
//   out = activation(x weight^T + b[s] h + adapter_bias[s] + bias) + residual
//
// Arguments: GemmWna16AdaptedSm90Params, below.
//
// Numerics: see gemm_wna16_sm90.cu and common/low_rank.cuh.
// Parallelisation: see gemm_wna16_sm90.cu. Each consumer warp multiplies 16 rows of b by h of the
// tile's tokens, adapter by adapter, with mma.sync on its sums in registers.
// Mirror: engine/reference/gemm_wna16.py, after engine/reference/lora_expand.py
#include "gemm_wna16/gemm_wna16_body_sm90.cuh"

// Fields without a comment: see GemmWna16Sm90Params.
struct GemmWna16AdaptedSm90Params {
  TensorMap map_x;
  TensorMap map_tail;
  TensorMap map_data;
  TensorMap map_high;
  TensorMap map_scales;
  TensorMap map_supers;
  const scalar_t* bias;
  const void* residual;
  int64_t residual_stride;
  void* out;
  int64_t out_stride;
  int m, n, slabs;
  int x_part, tail_part;
  int num_gates;
  int activation;
  int is_float;
  int is_vector;
  int is_early;
  // The adapters of the rows; see LowRank.
  const float* h;
  const scalar_t* b;
  const scalar_t* adapter_bias;
  const int* has_bias;
  const int* slots;
  int num_splits, num_adapters, rank, h_columns;
  int bound0, bound1, bound2, bound3, bound4, bound5, bound6, bound7;
};

extern "C" __global__ void __cluster_dims__(kSplits, 1, 1) __launch_bounds__(kThreads, kBlocks)
    gemm_wna16_adapted_sm90(const __grid_constant__ GemmWna16AdaptedSm90Params p) {
  gemm_wna16_sm90(p, low_rank_of(p));
}
