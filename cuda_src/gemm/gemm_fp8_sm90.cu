// Matrix product of codes of 8 bits (e4m3) with scales and a fused epilogue on Hopper.
//
//   out = activation((xq weight^T) * x_scales * weight_scales + bias) + residual
//
// Arguments: GemmW8Sm90Params in gemm/w8_sm90.cuh.
//
// Numerics: the tensor cores sum 128 values of k, to some 14 bits; these sums are added in float.
// Scales, bias, activation and residual in float, one rounding at the end.
// Parallelisation: as gemm_sm90.cu, sharing its producer, scheduler and epilogue; a slab of k is
// 128 values.
// Mirror: engine/reference/gemm_fp8.py
#include "gemm/w8_sm90.cuh"

ENGINE_GEMM_W8_SM90(gemm_fp8_sm90)
