// gemm_wna16 for few rows of x, with the bits of gemm_wna16_sm90.cu for `deterministic`.
//
//   out = activation(x weight^T + bias) + residual
//
// Arguments: FewRowsParams in gemm_wna16_problem.cuh. Each module is compiled for one weight format
// (weight_format.cuh).
//
// Numerics: weights are scaled and rounded to scalar_t, products and sums are float, one rounding
// at the end. One warp sums a part of k, the same as in gemm_wna16_sm90.cu, in ascending steps of
// 16, for which mma.sync and wgmma return the same bits; then the parts are added in order.
// Parallelisation: see gemm_wna16_few_rows.cuh.
// Mirror: engine/reference/gemm_wna16.py
#define ROUNDS_WEIGHTS
#include "gemm_wna16/gemm_wna16_few_rows.cuh"

ENGINE_FEW_ROWS_ENTRIES(gemm_wna16, false)
