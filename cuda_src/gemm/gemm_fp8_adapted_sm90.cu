// gemm_fp8_sm90.cu with LoRA adapters: see gemm_adapted_sm90.cu.
//
//   out = activation((xq weight^T) * scales + b[s] h + adapter_bias[s] + bias) + residual
//
// Arguments: GemmW8AdaptedSm90Params in gemm/w8_adapted_sm90.cuh.
//
// Numerics: see gemm_fp8_sm90.cu and gemm/low_rank.cuh.
// Parallelisation: see gemm_adapted_sm90.cu.
// Mirror: engine/reference/gemm_fp8.py, after engine/reference/lora_expand.py
#include "gemm/w8_adapted_sm90.cuh"

ENGINE_GEMM_W8_ADAPTED_SM90(gemm_fp8_adapted_sm90)
