// gemm for few rows of x on Hopper, with the bits of gemm_sm90.cu for `deterministic`.
//
//   out = activation(x weight^T + bias) + residual
//
// Arguments: SkinnyParams in gemm/gemm_problem.cuh; k_per_split is the length of a part of k.
//
// Numerics: a warp sums a part of k as gemm_sm90.cu does, in ascending steps of 16, for which
// mma.sync and wgmma return the same bits; the parts are added in order, and the product is rounded
// before a residual is added. Parallelisation: see skinny_ring.cuh and gemv.cuh.
// Mirror: engine/reference/gemm.py
#define SUMS_IN_PARTS
#include "gemm/gemm_entries.cuh"

ENGINE_SKINNY_ENTRY(gemm_skinny_ring_8, 512, 1, skinny_ring<SkinnyShape<1, 5, 2>, false>)
ENGINE_SKINNY_ENTRY(gemm_skinny_ring_16, 512, 1, skinny_ring<SkinnyShape<2, 4, 2>, false>)
ENGINE_SKINNY_ENTRY(gemm_gemv, 512, 1, gemv<false>)
ENGINE_RESIDENT_ENTRY(gemm)
