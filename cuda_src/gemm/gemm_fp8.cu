// GEMM of 8-bit codes (e4m3) with scales and a fused epilogue, for every GPU.
//
//   out = activation((xq weight^T) * x_scales * weight_scales + bias) + residual
//
// Arguments and formula: W8Params in gemm/w8_problem.cuh.
//
// Numerics: codes are multiplied as __half, which represents them exactly, and summed in float.
// Scales, bias, activation and residual are applied in float, with one rounding at the end.
// Parallelisation: tiles of 64 x 64 (w8_tile.cuh); for few rows and 16-bit types, weights stream
// through rings, in blocks that also quantize x (w8_skinny.cuh).
// Mirror: engine/reference/gemm_fp8.py
#include "gemm/w8_tile.cuh"
#if ENGINE_DTYPE != 0
#include "gemm/w8_skinny.cuh"

// Two blocks leave 128 registers per thread, of which float16 needs more.
constexpr int kBlocksPerSm = ENGINE_DTYPE == 1 ? 1 : 2;

ENGINE_W8_SKINNY(gemm_fp8_skinny_5, 2, w8_skinny<Fp8Product, false, 5>)
ENGINE_W8_SKINNY(gemm_fp8_skinny_4, 2, w8_skinny<Fp8Product, false, 4>)
ENGINE_W8_SKINNY(gemm_fp8_skinny_3, 2, w8_skinny<Fp8Product, false, 3>)
ENGINE_W8_SKINNY(gemm_fp8_blocks_skinny_5, kBlocksPerSm, w8_skinny<Fp8Product, true, 5>)
ENGINE_W8_SKINNY(gemm_fp8_blocks_skinny_4, kBlocksPerSm, w8_skinny<Fp8Product, true, 4>)
ENGINE_W8_SKINNY(gemm_fp8_blocks_skinny_3, kBlocksPerSm, w8_skinny<Fp8Product, true, 3>)
#endif

ENGINE_W8_TILE(gemm_fp8_tile, w8_tile<Fp8Product, false, true>)
ENGINE_W8_TILE(gemm_fp8_unaligned, w8_tile<Fp8Product, false, false>)
ENGINE_W8_TILE(gemm_fp8_blocks_tile, w8_tile<Fp8Product, true, true>)
ENGINE_W8_TILE(gemm_fp8_blocks_unaligned, w8_tile<Fp8Product, true, false>)
