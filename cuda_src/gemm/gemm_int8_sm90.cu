// Matrix product of codes of 8 bits (int8) with scales and a fused epilogue on Hopper.
//
//   out = activation((xq weight^T) * x_scales * weight_scales + bias) + residual
//
// Arguments: GemmW8Sm90Params in gemm/w8_sm90.cuh.
//
// Numerics: sums of 128 values of k are exact; multiplied by the scale of their group of x they are
// added in float. Scales of the weight, bias, activation and residual in float, one rounding at the
// end.
// Parallelisation: as gemm_sm90.cu, sharing its producer, scheduler and epilogue; a slab of k is
// 128 values.
// Mirror: engine/reference/gemm_int8.py
#include "gemm/w8_sm90.cuh"

ENGINE_GEMM_W8_SM90(gemm_int8_sm90)
