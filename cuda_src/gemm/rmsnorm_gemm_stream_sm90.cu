// RMSNorm fused into a product of one row of x on Hopper, with the bits of rmsnorm.cu and
// gemm_sm90.cu for `deterministic`.
//
//   h   = x / sqrt(mean(x^2) + eps) * (norm_weight + weight_offset)     (rounded to scalar_t)
//   out = activation(h weight^T + bias)
//
// Arguments: SkinnyParams in gemm/gemm_problem.cuh; M is 1, and K at most 4096.
//
// Numerics: squares are added as in rmsnorm_row.cuh; for the product see gemm_stream_sm90.cu.
// Parallelisation: see skinny_ring.cuh and gemv.cuh.
// Mirror: engine/reference/rmsnorm_gemm.py
#define SUMS_IN_PARTS
#include "gemm/gemm_entries.cuh"

ENGINE_SKINNY_ENTRY(rmsnorm_gemm_skinny_ring_8, 512, 1, skinny_ring<SkinnyShape<1, 5, 2>, true>)
ENGINE_SKINNY_ENTRY(rmsnorm_gemm_gemv, 512, 1, gemv<true>)
