// The entry points that gemm.cu and rmsnorm_gemm.cu share: same kernels, without and with a norm in
// front. The choice among them is choose_config in engine/kernels/gemm/config.py.
#pragma once

#include "gemm/mma_tile.cuh"
#include "gemm/simt_tile.cuh"
#include "gemm/skinny.cuh"
#include "gemm/stream.cuh"

// `...` is the device function, taking a Problem.
#define ENGINE_GEMM_ENTRY(name, threads, min_blocks, ...)                                        \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks)                              \
      name(const scalar_t* x, int64_t x_stride, const scalar_t* weight,                          \
           const scalar_t* norm_weight, const float* row_scales, float eps, float weight_offset, \
           const scalar_t* bias, const void* residual, int64_t residual_stride, void* out,       \
           int64_t out_stride, float* partials, int m, int n, int k, int k_per_split,            \
           int activation, int is_float, int is_vector) {                                        \
    const Epilogue epilogue{bias,       residual,   out,           residual_stride,              \
                            out_stride, activation, is_float != 0, is_vector != 0};              \
    __VA_ARGS__(Problem{x, weight, x_stride, m, n, k, k_per_split, partials,                     \
                        Norm{norm_weight, row_scales, eps, weight_offset}, epilogue});           \
  }

#define ENGINE_STREAM_ENTRY(name, threads, min_blocks, ...)                                        \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks)                                \
      name(const scalar_t* x, int64_t x_stride, const scalar_t* weight,                            \
           const scalar_t* norm_weight, float eps, float weight_offset, const scalar_t* bias,      \
           const void* residual, int64_t residual_stride, void* out, int64_t out_stride, int m,    \
           int n, int k, int k_per_split, int num_tiles, int slots, int num_gates, int activation, \
           int is_float, int is_vector, int uses_pdl, int warms_up) {                              \
    const Epilogue epilogue{bias,       residual,   out,           residual_stride,                \
                            out_stride, activation, is_float != 0, is_vector != 0};                \
    __VA_ARGS__(Problem{x, weight, x_stride, m, n, k, k_per_split, nullptr,                        \
                        Norm{norm_weight, nullptr, eps, weight_offset}, epilogue},                 \
                StreamCut{num_tiles, slots, num_gates, warms_up != 0}, uses_pdl != 0);             \
  }

#if ENGINE_DTYPE != 0
// stream: tokens / 8, slots of a warp's ring, buffers of sums. These figures are also in
// engine/kernels/gemm/stream.py.
#define ENGINE_STREAM_ENTRIES(op, norm)                                           \
  ENGINE_STREAM_ENTRY(op##_stream_8, 512, 1, stream<StreamShape<1, 5, 2>, norm>)  \
  ENGINE_STREAM_ENTRY(op##_stream_16, 256, 1, stream<StreamShape<2, 4, 2>, norm>) \
  ENGINE_STREAM_ENTRY(op##_stream_32, 256, 1, stream<StreamShape<4, 3, 1>, norm>) \
  ENGINE_STREAM_ENTRY(op##_stream_held, 512, 1, stream_held<norm>)

// tile: m, n of the block's tile, m, n of a warp's, stages. skinny: tokens / 8, weight rows / 16,
// warps (float32: tokens, weight rows, warps). Registers bound the blocks that share a
// multiprocessor: 128 accumulators a thread with warps of 64 x 64.
#define ENGINE_GEMM_ENTRIES(op, norm)                                                       \
  ENGINE_GEMM_ENTRY(op##_tile_128x256, 256, 1, mma_tile<128, 256, 64, 64, 4, true, norm>)   \
  ENGINE_GEMM_ENTRY(op##_tile_128x128, 128, 2, mma_tile<128, 128, 64, 64, 4, true, norm>)   \
  ENGINE_GEMM_ENTRY(op##_tile_64x128, 128, 3, mma_tile<64, 128, 32, 64, 5, true, norm>)     \
  ENGINE_GEMM_ENTRY(op##_tile_64x64, 128, 4, mma_tile<64, 64, 32, 32, 6, true, norm>)       \
  ENGINE_GEMM_ENTRY(op##_unaligned_64x64, 128, 3, mma_tile<64, 64, 32, 32, 3, false, norm>) \
  ENGINE_GEMM_ENTRY(op##_skinny_8x16_w8, 256, 3, skinny<1, 1, 8, norm>)                     \
  ENGINE_GEMM_ENTRY(op##_skinny_16x32_w8, 256, 2, skinny<2, 2, 8, norm>)                    \
  ENGINE_GEMM_ENTRY(op##_skinny_32x32_w8, 256, 1, skinny<4, 2, 8, norm>)                    \
  ENGINE_GEMM_ENTRY(op##_skinny_8x16_w16, 512, 2, skinny<1, 1, 16, norm>)                   \
  ENGINE_GEMM_ENTRY(op##_skinny_16x16_w16, 512, 1, skinny<2, 1, 16, norm>)                  \
  ENGINE_GEMM_ENTRY(op##_skinny_32x16_w16, 512, 1, skinny<4, 1, 16, norm>)
#else
#define ENGINE_STREAM_ENTRIES(op, norm)
#define ENGINE_GEMM_ENTRIES(op, norm)                                                    \
  ENGINE_GEMM_ENTRY(op##_tile_128x128, kSimtThreads, 2, simt_tile<8, 4, true, norm>)     \
  ENGINE_GEMM_ENTRY(op##_tile_64x64, kSimtThreads, 3, simt_tile<4, 4, true, norm>)       \
  ENGINE_GEMM_ENTRY(op##_unaligned_64x64, kSimtThreads, 3, simt_tile<4, 3, false, norm>) \
  ENGINE_GEMM_ENTRY(op##_skinny_1x4_w8, 256, 3, skinny<1, 4, 8, norm>)                   \
  ENGINE_GEMM_ENTRY(op##_skinny_8x2_w8, 256, 2, skinny<8, 2, 8, norm>)
#endif
