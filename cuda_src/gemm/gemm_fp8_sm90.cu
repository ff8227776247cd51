// GEMM of 8-bit codes (e4m3) with scales and a fused epilogue on Hopper.
//
//   out = activation((xq weight^T) * x_scales * weight_scales + bias) + residual
//
// Arguments: GemmW8Sm90Params in gemm/w8_sm90.cuh.
//
// Numerics: the tensor cores sum 128 values of k to about 14 bits; these sums are added in float.
// Scales, bias, activation and residual in float, one rounding at the end.
// Parallelisation: see gemm_sm90.cu, whose producer, scheduler and epilogue this kernel shares; a
// slab of k is 128 values.
// Mirror: engine/reference/gemm_fp8.py
#include "gemm/w8_sm90.cuh"

ENGINE_GEMM_W8_SM90(gemm_fp8_sm90)
