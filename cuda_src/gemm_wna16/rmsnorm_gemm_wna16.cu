// RMSNorm fused into a GEMM with a quantized weight, for few rows of x.
//
//   h   = x / sqrt(mean(x^2) + eps) * (norm_weight + weight_offset)     (rounded to scalar_t)
//   out = activation(h weight^T + bias)
//
// Arguments: FewRowsParams in gemm_wna16_problem.cuh. Each module is compiled for one weight format
// (weight_format.cuh).
//
// Numerics: the norm in float; h is rounded before the product, so the result equals that of the
// two separate ops up to summation order. Product: see gemm_wna16.cu.
// Parallelisation: every block normalises x on its way to shared memory, while its first weights
// are in flight.
// Mirror: engine/reference/rmsnorm_gemm_wna16.py
#include "gemm_wna16/gemm_wna16_few_rows.cuh"

ENGINE_FEW_ROWS_ENTRIES(rmsnorm_gemm_wna16, true)
