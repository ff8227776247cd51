// Entry points for 16-bit types, on tensor cores. Included by gemm_entries.cuh, which defines the
// macros used here.
#pragma once

// ring: tokens / 8, stages of a warp's ring, buffers of partial sums. The sizes must match
// engine/kernels/gemm/skinny.py; tests/kernels/test_cuda_constants.py checks them.
#define ENGINE_SKINNY_ENTRIES(op, norm)                                                     \
  ENGINE_SKINNY_ENTRY(op##_skinny_ring_8, 512, 1, skinny_ring<SkinnyShape<1, 5, 2>, norm>)  \
  ENGINE_SKINNY_ENTRY(op##_skinny_ring_16, 256, 1, skinny_ring<SkinnyShape<2, 4, 2>, norm>) \
  ENGINE_SKINNY_ENTRY(op##_skinny_ring_32, 256, 1, skinny_ring<SkinnyShape<4, 3, 1>, norm>) \
  ENGINE_SKINNY_ENTRY(op##_gemv, 512, 1, gemv<norm>)

#define ENGINE_RESIDENT_ENTRY(op) \
  ENGINE_SKINNY_ENTRY(op##_resident_8, 512, 1, resident_rows<SkinnyShape<1, 1, 1>>)

// tile: m and n of the block tile, m and n of the warp tile, stages. direct: tokens / 8, weight
// rows / 16, warps. Registers limit the blocks per multiprocessor: a 64 x 64 warp tile takes 128
// accumulators per thread.
#define ENGINE_GEMM_ENTRIES(op, norm)                                                        \
  ENGINE_GEMM_ENTRY(op##_tile_128x256, 256, 1, mma_tile<128, 256, 64, 64, 4, true, norm>)    \
  ENGINE_GEMM_ENTRY(op##_tile_128x128, 128, 2, mma_tile<128, 128, 64, 64, 4, true, norm>)    \
  ENGINE_GEMM_ENTRY(op##_tile_64x128, 128, 3, mma_tile<64, 128, 32, 64, 5, true, norm>)      \
  ENGINE_GEMM_ENTRY(op##_tile_64x64, 128, 4, mma_tile<64, 64, 32, 32, 6, true, norm>)        \
  ENGINE_GEMM_ENTRY(op##_unaligned_64x64, 128, 3, mma_tile<64, 64, 32, 32, 3, false, norm>)  \
  ENGINE_GEMM_ENTRY(op##_skinny_direct_8x16_w8, 256, 3, skinny_direct_mma<1, 1, 8, norm>)    \
  ENGINE_GEMM_ENTRY(op##_skinny_direct_16x32_w8, 256, 2, skinny_direct_mma<2, 2, 8, norm>)   \
  ENGINE_GEMM_ENTRY(op##_skinny_direct_32x32_w8, 256, 1, skinny_direct_mma<4, 2, 8, norm>)   \
  ENGINE_GEMM_ENTRY(op##_skinny_direct_8x16_w16, 512, 2, skinny_direct_mma<1, 1, 16, norm>)  \
  ENGINE_GEMM_ENTRY(op##_skinny_direct_16x16_w16, 512, 1, skinny_direct_mma<2, 1, 16, norm>) \
  ENGINE_GEMM_ENTRY(op##_skinny_direct_32x16_w16, 512, 1, skinny_direct_mma<4, 1, 16, norm>)
