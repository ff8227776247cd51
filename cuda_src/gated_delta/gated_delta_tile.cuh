// A chunk's matrices in shared memory, as the scan reads them: 64 rows, in panels of 64 columns
// whose rows of 128 bytes are swizzled (common/swizzle.cuh). ldmatrix and wgmma both read them.
#pragma once

#include "common/cp_async.cuh"
#include "common/swizzle.cuh"
#include "gated_delta/gated_delta_chunk.cuh"

constexpr int kPanelColumns = 64;
constexpr int kPanelBytes = kChunkTokens * kSwizzleRowBytes;

template <int kColumns>
constexpr int kTileBytes = (kColumns + kPanelColumns - 1) / kPanelColumns * kPanelBytes;

// Address of the eight values from `column` on, a multiple of 8.
__device__ __forceinline__ uint32_t tile_address(uint32_t tile, int row, int column) {
  return tile + column / kPanelColumns * kPanelBytes +
         swizzle_128b(row, column % kPanelColumns / kVec);
}

// Copies `count` rows of kColumns values; the other rows become zeros. `thread` is one of kThreads.
template <int kColumns, int kThreads>
__device__ __forceinline__ void copy_tile(uint32_t tile, const scalar_t* gmem, int64_t stride,
                                          int count, int thread) {
  constexpr int kPerRow = kColumns / kVec;
  if constexpr (kThreads % kPerRow == 0) {  // a thread's rows are evenly spaced
    const int first_row = thread / kPerRow, column = thread % kPerRow * kVec;
    gmem += first_row * stride + column;
#pragma unroll 4
    for (int i = 0; i < kChunkTokens; i += kThreads / kPerRow) {
      const int row = first_row + i;
      if (kChunkTokens % (kThreads / kPerRow) != 0 && row >= kChunkTokens) break;
      cp_async_16(tile_address(tile, row, column), gmem + i * stride, row < count);
    }
  } else {
#pragma unroll 4
    for (int i = thread; i < kChunkTokens * kPerRow; i += kThreads) {
      const int row = i / kPerRow, column = i % kPerRow * kVec;
      cp_async_16(tile_address(tile, row, column), gmem + row * stride + column, row < count);
    }
  }
}

// Copies a lower triangular matrix of 64 x 64 values, without the blocks of 16 x 16 beyond the
// diagonal.
template <int kThreads>
__device__ __forceinline__ void copy_triangle(uint32_t tile, const scalar_t* gmem, int thread) {
  constexpr int kPerRow = kChunkTokens / kVec;
  const int column = thread % kPerRow * kVec;
#pragma unroll 4
  for (int i = 0; i < kChunkTokens; i += kThreads / kPerRow) {
    const int row = thread / kPerRow + i;
    if (column / 16 <= row / 16)
      cp_async_16(tile_address(tile, row, column), gmem + row * kChunkTokens + column);
  }
}
