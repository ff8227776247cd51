// Matrix product with a quantized weight, for few rows of x.
//
//   out = activation(x weight^T + bias) + residual
//
// Arguments: FewRowsParams in gemm_wna16_problem.cuh; the weight's format is the module's
// (weight_format.cuh).
//
// Numerics: products of 16-bit values on tensor cores, the codes as exact integers; sums, scales,
// bias, activation and residual in float, one rounding at the end. The order of summation is fixed.
// Parallelisation: the weight's bytes are the cost; gemm_wna16_few_rows.cuh streams them through
// rings of shared memory, and its warps share rows and k.
// Mirror: engine/reference/gemm_wna16.py
#include "gemm_wna16/gemm_wna16_few_rows.cuh"

ENGINE_FEW_ROWS_ENTRIES(gemm_wna16, false)
