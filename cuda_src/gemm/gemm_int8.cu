// GEMM of 8-bit codes (int8) with scales and a fused epilogue, for every GPU.
//
//   out = activation((xq weight^T) * x_scales * weight_scales + bias) + residual
//
// Arguments and formula: W8Params in gemm/w8_problem.cuh.
//
// Numerics: sums over 128 values of k are exact; each is multiplied by its group's scale of x and
// added in float. Weight scales, bias, activation and residual in float, one rounding at the end.
// Parallelisation: tiles of 64 x 64 (w8_tile.cuh); for few rows and 16-bit types, weights stream
// through rings, in blocks that also quantize x (w8_skinny.cuh).
// Mirror: engine/reference/gemm_int8.py
#include "gemm/w8_tile.cuh"
#if ENGINE_DTYPE != 0
#include "gemm/w8_skinny.cuh"

ENGINE_W8_SKINNY(gemm_int8_skinny_5, 1, w8_skinny<Int8Product, false, 5>)
ENGINE_W8_SKINNY(gemm_int8_skinny_4, 1, w8_skinny<Int8Product, false, 4>)
ENGINE_W8_SKINNY(gemm_int8_skinny_3, 1, w8_skinny<Int8Product, false, 3>)
#endif

ENGINE_W8_TILE(gemm_int8_tile, w8_tile<Int8Product, false, true>)
ENGINE_W8_TILE(gemm_int8_unaligned, w8_tile<Int8Product, false, false>)
