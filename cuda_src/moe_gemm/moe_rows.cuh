// The rows that a block of moe_gemm.cu multiplies, their expert, and their loads to shared memory.
#pragma once

#include "common/reduce.cuh"
#include "common/epilogue.cuh"
#include "moe_gemm/moe_activation.cuh"
#include "common/tile_loader.cuh"

struct MoeGemmParams {
  const scalar_t* x;          // (T, K), or (P, K) if `scatters`; contiguous
  const scalar_t* weight;     // (E, R, K) or, transposed, (E, K, R); contiguous
  const int* order;           // (P,)
  const int* offsets;         // (E + 1,)
  const float* pair_weights;  // (P,), or null: 1
  const scalar_t* bias;       // (E, R), or null
  scalar_t* out;              // (P, R), or (P, R / 2) with an activation
  int num_pairs, num_experts, num_rows, k, top_k;
  int activation;  // a MoeActivation
  float alpha, limit;
  int scatters;   // rows of x are sorted, those of out in the order of pairs
  int is_vector;  // rows of out can be written four elements at a time
};

// Sorted pairs first to end - 1, all of one expert.
struct MoeRows {
  int expert, first, end;
};

__device__ __forceinline__ MoeRows rows_of(const MoeGemmParams& p, int expert) {
  const int first = min(max(p.offsets[expert], 0), p.num_pairs);
  return {expert, first, min(max(p.offsets[expert + 1], first), p.num_pairs)};
}

// Finds the rows of this block's tile: tile blockIdx.x of all experts' tiles of kTileM rows, or no
// rows if there are fewer tiles. All threads must call it.
template <int kTileM>
__device__ __forceinline__ MoeRows find_rows(const MoeGemmParams& p) {
  __shared__ MoeRows smem_rows;
  if (threadIdx.x < kWarpSize) {
    const int lane_idx = threadIdx.x, index = blockIdx.x;
    const int each = (p.num_experts + kWarpSize - 1) / kWarpSize;
    const int begin = min(lane_idx * each, p.num_experts), end = min(begin + each, p.num_experts);
    const auto tiles = [](const MoeRows& r) { return (r.end - r.first + kTileM - 1) / kTileM; };
    int own = 0;
    for (int e = begin; e < end; ++e) own += tiles(rows_of(p, e));
    int after = own;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, after, step);
      if (lane_idx >= step) after += other;
    }
    // Exactly one lane writes.
    if (lane_idx == kWarpSize - 1 && index >= after) smem_rows = {0, 0, 0};
    if (index >= after - own && index < after) {
      int tile = index - (after - own);
      MoeRows rows = rows_of(p, begin);
      for (int e = begin + 1; e < end && tile >= tiles(rows); ++e) {
        tile -= tiles(rows);
        rows = rows_of(p, e);
      }
      rows.first += tile * kTileM;
      rows.end = min(rows.end, rows.first + kTileM);
      smem_rows = rows;
    }
  }
  __syncthreads();
  return smem_rows;
}

// TileLoader for rows of x: the pairs' tokens, or if `scatters` the sorted rows themselves.
template <int kRows, int kThreads, bool kAligned>
struct MoeRowLoader {
  static constexpr int kRowStep = kThreads / kChunksPerRow;
  static constexpr int kNumRows = kRows / kRowStep;
  static_assert(kRowStep % 8 == 0 && kNumRows * kRowStep == kRows, "the swizzle must not change");

  const scalar_t* x;
  const scalar_t* chunks[kNumRows];  // this thread's chunk in each of its rows; null: no such row
  int column, smem_offset;

  __device__ __forceinline__ MoeRowLoader(const MoeGemmParams& p, const MoeRows& rows)
      : x(p.x), column(threadIdx.x % kChunksPerRow * kVec) {
    const int first_row = threadIdx.x / kChunksPerRow;
    smem_offset = swizzled(first_row, threadIdx.x % kChunksPerRow);
#pragma unroll
    for (int i = 0; i < kNumRows; ++i) {
      const int place = rows.first + first_row + i * kRowStep;
      chunks[i] = nullptr;
      if (place >= rows.end) continue;
      int row = place;
      if (!p.scatters) {
        const int pair = p.order[place];
        if (pair < 0 || pair >= p.num_pairs) continue;
        row = pair / p.top_k;
      }
      chunks[i] = p.x + static_cast<int64_t>(row) * p.k + column;
    }
  }

  __device__ __forceinline__ void load(unsigned char* smem, int k, int k_end) const {
#pragma unroll
    for (int i = 0; i < kNumRows; ++i)
      load_chunk<kAligned>(smem + smem_offset + i * kRowStep * kTileRowBytes, chunks[i] + k, x,
                           chunks[i] != nullptr, k + column, k_end);
  }
};

// Row k of a matrix (K, R).
struct MatrixRow {
  const scalar_t* matrix;
  int num_cols;

  __device__ __forceinline__ const scalar_t* operator()(int k) const {
    return matrix + static_cast<int64_t>(k) * num_cols;
  }
};

// moe_weight_loader of a matrix (R, K).
template <int kRows, int kThreads, bool kAligned>
__device__ __forceinline__ TileLoader<kRows, kThreads, kAligned> moe_row_loader(
    const MoeGemmParams& p, const scalar_t* matrix, int col0, bool is_gated) {
  using Loader = TileLoader<kRows, kThreads, kAligned>;
  static_assert(Loader::kRowStep % 16 == 0, "a thread's rows are all of gate, or all of up");
  Loader loader(matrix, p.k, col0, p.num_rows);
  if (is_gated) {
    const int num_gates = p.num_rows / 2, gate = Epilogue::gated_column(col0 + loader.first_row);
    const int64_t row = gate + (loader.first_row % 16 < 8 ? 0 : num_gates);
    loader.first = matrix + row * p.k + loader.column;
    loader.step /= 2;  // kRowStep columns correspond to half as many rows of each
    loader.rows_left = 2 * (num_gates - gate);
  }
  return loader;
}

// Returns the loader of the rows of an expert's matrix that compute columns col0 to col0 + kRows of
// the product; with `is_gated` these alternate between gate and up in groups of eight, as in
// epilogue.cuh. With kTransposed they are columns of the matrix in memory.
template <int kRows, int kThreads, bool kAligned, bool kTransposed>
__device__ __forceinline__ auto moe_weight_loader(const MoeGemmParams& p, int expert, int col0,
                                                  bool is_gated) {
  const scalar_t* matrix = p.weight + static_cast<int64_t>(expert) * p.num_rows * p.k;
  if constexpr (kTransposed) {
    using Loader = ColumnTileLoader<kRows, kThreads, kAligned, MatrixRow>;
    return Loader(matrix, MatrixRow{matrix, p.num_rows}, col0, p.num_rows);
  } else {
    return moe_row_loader<kRows, kThreads, kAligned>(p, matrix, col0, is_gated);
  }
}
