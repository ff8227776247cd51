// Entry points for float32, on CUDA cores. Included by gemm_entries.cuh, which defines the macros
// used here.
#pragma once

// The skinny kernels that keep weights in a ring or in registers support 16-bit types only.
#define ENGINE_SKINNY_ENTRIES(op, norm)
#define ENGINE_RESIDENT_ENTRY(op)

// tile: outputs per thread along m and along n, stages. direct: tokens, weight rows, warps.
#define ENGINE_GEMM_ENTRIES(op, norm)                                                    \
  ENGINE_GEMM_ENTRY(op##_tile_128x128, kSimtThreads, 2, simt_tile<8, 4, true, norm>)     \
  ENGINE_GEMM_ENTRY(op##_tile_64x64, kSimtThreads, 3, simt_tile<4, 4, true, norm>)       \
  ENGINE_GEMM_ENTRY(op##_unaligned_64x64, kSimtThreads, 3, simt_tile<4, 3, false, norm>) \
  ENGINE_GEMM_ENTRY(op##_skinny_direct_1x4_w8, 256, (norm) ? 3 : 4,                      \
                    skinny_direct_simt<1, 4, 8, norm>)                                   \
  ENGINE_GEMM_ENTRY(op##_skinny_direct_8x2_w8, 256, 2, skinny_direct_simt<8, 2, 8, norm>)
