// GEMM of 8-bit codes (int8) with scales and a fused epilogue on Hopper.
//
//   out = activation((xq weight^T) * x_scales * weight_scales + bias) + residual
//
// Arguments: GemmW8Sm90Params in gemm/w8_sm90.cuh.
//
// Numerics: sums over 128 values of k are exact; each is multiplied by its group's scale of x and
// added in float. Weight scales, bias, activation and residual in float, one rounding at the end.
// Parallelisation: see gemm_sm90.cu, whose producer, scheduler and epilogue this kernel shares; a
// slab of k is 128 values.
// Mirror: engine/reference/gemm_int8.py
#include "gemm/w8_sm90.cuh"

ENGINE_GEMM_W8_SM90(gemm_int8_sm90)
