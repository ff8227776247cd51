// A warp's ring of weight stages, filled by cp.async.
//
// A stage is two halves of 64 values of k, each of 16 rows of 128 bytes in eight 16-byte chunks.
// Against bank conflicts of a read by eight lanes, chunks 0-3 and 4-7 are swapped in odd rows; with
// kSumsInParts, which reads by ldmatrix, chunk c of row r lies at c ^ (r % 8). One copy instruction
// of a warp covers four whole 128-byte lines: L1 looks up one tag per clock, so twice as many half
// lines would take twice as long.
#pragma once

#include "common/cp_async.cuh"
#include "gemm/skinny_block.cuh"

// Loads a warp's weights in order of use, one stage at a time. If all gate rows precede the up
// rows, the first eight of the 16 rows are gate rows, the others the matching up rows.
template <typename Shape>
struct WeightLoader {
  const Problem& p;
  const SkinnyBlock<Shape>& b;
  const scalar_t* from;
  int64_t row_step, half_step;  // offsets from row 0 to row 4, to row 8
  int tile, k, rows_left, stage;
  uint32_t to;

  __device__ __forceinline__ WeightLoader(const Problem& p, const SkinnyBlock<Shape>& b)
      : p(p), b(b), row_step(static_cast<int64_t>(p.k) * 4), tile(b.tile), stage(0) {
    half_step = b.num_gates > 0 ? static_cast<int64_t>(p.k) * b.num_gates : row_step * 2;
    const int row = b.lane_idx / 8, chunk = b.lane_idx % 8;
    to = row * 128 + ((chunk ^ (kSumsInParts ? row : (row & 1) << 2)) << 4);
    start_tile();
  }

  __device__ __forceinline__ void start_tile() {
    const int row0 = b.row0(tile), row = b.lane_idx / 8;
    k = b.k_begin + (b.lane_idx % 8) * kVec;
    rows_left = p.n - row0 - row;
    from = p.weight + static_cast<int64_t>((b.num_gates > 0 ? row0 / 2 : row0) + row) * p.k + k;
  }

  // Always commits a cp.async group, even an empty one: the wait counts groups.
  __device__ __forceinline__ void load() {
    if (tile < b.num_tiles && b.k_begin < b.k_end) {
      unsigned char* smem = b.ring + stage * Shape::kStageBytes + to;
      unsigned char* smem_of_odd = b.ring + stage * Shape::kStageBytes + (to ^ 64);  // row & 4
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool has_k = k + half * 64 < b.k_end;
        const scalar_t* source = from + half * 64;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool valid = has_k && i * 4 < rows_left;
          const scalar_t* row = source + i / 2 * half_step + i % 2 * row_step;
          unsigned char* place = smem;
          if (kSumsInParts && i % 2 != 0) place = smem_of_odd;
          cp_async_16(place + half * (Shape::kStageBytes / 2) + i * 512, valid ? row : p.weight,
                      valid);
        }
      }
      k += kStepK, from += kStepK;
      if (k - (b.lane_idx % 8) * kVec >= b.k_end) tile += b.tile_step, start_tile();
    }
    cp_async_commit();
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
  }
};
