// Loads of the portable tiles of x and weight to shared memory.
#pragma once

#include "common/cp_async.cuh"

// A tile in shared memory has rows of 64 bytes along k: four 16-byte chunks, i.e. 32 16-bit values
// or 16 floats. Chunk c of row r is stored at c ^ (r / 2) % 4. Chunks c of eight aligned rows are
// then in different banks, so neither ldmatrix nor a 16-byte load by eight lanes has bank
// conflicts.
constexpr int kTileRowBytes = 64;
constexpr int kChunksPerRow = 4;
constexpr int kTileK = kChunksPerRow * kVec;

__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * kTileRowBytes + ((chunk ^ ((row >> 1) & 3)) << 4);
}

// Offset of a chunk in a tile of the other orientation, whose kTileK rows of kCols values lie along
// k. With 16-bit values, chunk c of row r is stored at c ^ r % 8: eight rows of one chunk, which
// ldmatrix reads together, are then in different banks. CUDA cores read along a row.
template <int kCols>
__device__ __forceinline__ int swizzled_column(int row, int chunk) {
  const int flip = sizeof(scalar_t) == 2 ? row & 7 : 0;
  return (row * (kCols / kVec) + (chunk ^ flip)) * kVecBytes;
}

struct TileOrigin {
  int row, col;
};

// Blocks traverse the tiles in bands of kBandRows tiles along m, m first within a band. Blocks that
// run concurrently thus read few rows of x and weight, which stay in L2.
template <int kTileM, int kTileN>
__device__ __forceinline__ TileOrigin tile_origin(int m, int n) {
  constexpr int kBandRows = 8;
  const int tiles_m = (m + kTileM - 1) / kTileM, tiles_n = (n + kTileN - 1) / kTileN;
  const int band = blockIdx.x / (kBandRows * tiles_n), within = blockIdx.x % (kBandRows * tiles_n);
  const int rows = min(kBandRows, tiles_m - band * kBandRows);
  return {(band * kBandRows + within % rows) * kTileM, within / rows * kTileN};
}

// Copies a row's chunk from `column` on. Values from column k_end on, or of a nonexistent row,
// become zero. `anywhere` is any valid address, for copies of zero bytes.
template <bool kAligned>
__device__ __forceinline__ void load_chunk(unsigned char* to, const scalar_t* from,
                                           const scalar_t* anywhere, bool has_row, int column,
                                           int k_end) {
  if constexpr (kAligned) {
    const bool valid = has_row && column < k_end;
    cp_async_16(to, valid ? from : anywhere, valid);
  } else {
    Vec<scalar_t, kVec> values = {};
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (has_row && column + j < k_end) values.v[j] = from[j];
    store_vec(reinterpret_cast<scalar_t*>(to), values);
  }
}

// Copies kRows rows of a matrix to shared memory, one k tile per call. A thread always copies the
// same chunk of rows first_row + i * kRowStep, so only the column changes between calls.
template <int kRows, int kThreads, bool kAligned>
struct TileLoader {
  static constexpr int kRowStep = kThreads / kChunksPerRow;
  static constexpr int kNumRows = kRows / kRowStep;
  static_assert(kRowStep % 8 == 0 && kNumRows * kRowStep == kRows, "the swizzle must not change");

  const scalar_t *matrix, *first;  // `first`: this thread's chunk of its first row
  int64_t step;                    // elements between this thread's successive rows
  int first_row, rows_left;        // first row within the tile; matrix rows from there on
  int column, smem_offset;

  __device__ __forceinline__ TileLoader(const scalar_t* matrix, int64_t stride, int row0, int rows)
      : matrix(matrix),
        first_row(threadIdx.x / kChunksPerRow),
        rows_left(rows - row0 - first_row),
        column(threadIdx.x % kChunksPerRow * kVec) {
    first = matrix + (static_cast<int64_t>(row0) + first_row) * stride + column;
    step = stride * kRowStep;
    smem_offset = swizzled(first_row, threadIdx.x % kChunksPerRow);
  }

  __device__ __forceinline__ bool has_row(int i) const { return i * kRowStep < rows_left; }

  // Loads columns [k, k + kTileK). Columns from k_end on and nonexistent rows become zero.
  __device__ __forceinline__ void load(unsigned char* smem, int k, int k_end) const {
#pragma unroll
    for (int i = 0; i < kNumRows; ++i)
      load_chunk<kAligned>(smem + smem_offset + i * kRowStep * kTileRowBytes, first + i * step + k,
                           matrix, has_row(i), k + column, k_end);
  }
};

// Copies kCols columns of a matrix whose rows lie along k, one k tile of rows per call.
// `row_of(k)` returns the address of row k. A thread always copies the same chunk of rows
// first_row + i * kRowStep of the tile.
template <int kCols, int kThreads, bool kAligned, typename RowOf>
struct ColumnTileLoader {
  static constexpr int kChunks = kCols / kVec;
  static constexpr int kRowStep = kThreads / kChunks;
  static constexpr int kNumRows = kTileK / kRowStep;
  static_assert(kRowStep * kChunks == kThreads && kNumRows * kRowStep == kTileK, "whole rows");

  const scalar_t* anywhere;  // any valid address
  const RowOf row_of;
  int num_cols, column, first_row;

  __device__ __forceinline__ ColumnTileLoader(const scalar_t* anywhere, const RowOf& row_of,
                                              int col0, int num_cols)
      : anywhere(anywhere),
        row_of(row_of),
        num_cols(num_cols),
        column(col0 + static_cast<int>(threadIdx.x) % kChunks * kVec),
        first_row(threadIdx.x / kChunks) {}

  // Loads rows [k, k + kTileK). Rows from k_end on and nonexistent columns become zero.
  __device__ __forceinline__ void load(unsigned char* smem, int k, int k_end) const {
#pragma unroll
    for (int i = 0; i < kNumRows; ++i) {
      const int row = first_row + i * kRowStep;
      const bool exists = k + row < k_end && column < num_cols;
      load_chunk<kAligned>(smem + swizzled_column<kCols>(row, threadIdx.x % kChunks),
                           exists ? row_of(k + row) + column : anywhere, anywhere, exists, column,
                           num_cols);
    }
  }
};
