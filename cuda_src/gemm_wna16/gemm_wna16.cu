// GEMM with a quantized weight, for few rows of x.
//
//   out = activation(x weight^T + bias) + residual
//
// Arguments: FewRowsParams in gemm_wna16_problem.cuh. Each module is compiled for one weight format
// (weight_format.cuh).
//
// Numerics: 16-bit values are multiplied on tensor cores, codes as exact integers; sums, scales,
// bias, activation and residual in float, one rounding at the end. The order of summation is fixed.
// Parallelisation: reading the weight dominates, so gemm_wna16_few_rows.cuh streams it through
// rings of shared memory, with rows and k divided among warps.
// Mirror: engine/reference/gemm_wna16.py
#include "gemm_wna16/gemm_wna16_few_rows.cuh"

ENGINE_FEW_ROWS_ENTRIES(gemm_wna16, false)
