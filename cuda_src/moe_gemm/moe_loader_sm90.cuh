// Loads of the rows of x, and the records that describe tiles to the consumers. Shared by the
// producers of moe_gemm_sm90.cu.
#pragma once

#include "common/pipeline_state.cuh"
#include "moe_gemm/moe_scheduler_sm90.cuh"

// TMA loads sorted rows. cp.async copies rows gathered through `order`, 16 bytes per thread,
// because TMA is slow for boxes of one row. Rows of a stage that no copy writes keep stale data:
// their sums are dropped.
struct MoeLoader {
  MoeShared& smem;
  const TensorMap *map_w, *map_x;  // map_w: null if the weight is packed
  const operand_t* x;              // (T, k), rows gathered through `order`
  const int* order;
  const float* pair_weights;  // null: 1
  bool scatters;              // rows of x are sorted; false: they are gathered through `order`
  int k, top_k, num_gates;

  static constexpr int kChunks = kSlabRowBytes / 16, kChunkK = 16 / sizeof(operand_t);
  static constexpr int kRowStep = kProducerThreads / kChunks;
  static constexpr int kRows = kTokens / kRowStep;
  static_assert(kRowStep % 8 == 0, "a thread's rows have the same swizzle");
  const operand_t* chunks[kRows];  // next chunk of each row of x that this thread copies
  int num_rows;                    // number of these rows

  __device__ __forceinline__ int thread() const { return threadIdx.x % kProducerThreads; }
  __device__ __forceinline__ bool is_gathered() const { return !scatters; }
  __device__ __forceinline__ int num_slabs() const { return (k + kSlabK - 1) / kSlabK; }

  __device__ __forceinline__ void begin(const MoeTile& tile) {
    if (!is_gathered()) return;
    const int row = thread() / kChunks;
    num_rows = row < tile.count ? (tile.count - row + kRowStep - 1) / kRowStep : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i >= num_rows) break;
      const int64_t from = order[tile.first + row + i * kRowStep] / top_k;
      chunks[i] = x + from * k + thread() % kChunks * kChunkK;
    }
  }

  // Writes the tile's record; called by all warps except the first.
  __device__ __forceinline__ void tell(const MoeTile& tile, PipelineState<kRecords>& record) const {
    if (thread() < kWarpSize) return;
    mbarrier_wait(smem_address(&smem.record_empty[record.stage]), record.phase);
    MoeTileRecord& to = smem.records[record.stage];
    if (thread() == kWarpSize) to.tile = tile;
    if (!is_gathered())
      for (int i = thread() - kWarpSize; i < tile.count; i += kRecordWriters) {
        const int pair = order[tile.first + i];
        to.rows[i] = pair;
        to.weights[i] = pair_weights != nullptr ? pair_weights[pair] : 1.0f;
      }
    mbarrier_arrive(smem_address(&smem.record_full[record.stage]));
    record.advance();
  }

  // Loads the weight; each producer defines its own.
  __device__ void weight(int stage, int slab, const MoeTile& tile) const;

  // Returns how many rows `sorted` loads.
  __device__ __forceinline__ int sorted_rows(const MoeTile& tile) const {
    return !is_gathered() ? (tile.count + kBoxRows - 1) / kBoxRows * kBoxRows : 0;
  }

  // Called by all threads: copies gathered rows, stage after stage of a tile.
  __device__ __forceinline__ void gather(int stage, int slab) {
    const int row = thread() / kChunks, chunk = thread() % kChunks;
    unsigned to = smem_address(smem.x[stage]) + row * kSlabRowBytes + ((chunk ^ (row & 7)) << 4);
    const int left = k - slab * kSlabK;  // columns left
    if (left >= kDepth * kSlabK) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i >= num_rows) break;
#pragma unroll
        for (int d = 0; d < kDepth; ++d)
          cp_async_16(to + d * kSlabX + i * kRowStep * kSlabRowBytes, chunks[i] + d * kSlabK);
        chunks[i] += kDepth * kSlabK;
      }
    } else {  // zeros past the row's end
#pragma unroll 1
      for (int d = 0; d * kSlabK < left; ++d, to += kSlabX) {
        const bool exists = d * kSlabK + chunk * kChunkK < left;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (i >= num_rows) break;
          cp_async_16(to + i * kRowStep * kSlabRowBytes, exists ? chunks[i] + d * kSlabK : x,
                      exists);
        }
      }
    }
    mbarrier_arrive_cp_async(smem_address(&smem.full[stage]));
  }

  // Loads every `step`th box of sorted rows, from box `first` on. Called by one thread, or by one
  // thread of each of `step` warps.
  __device__ __forceinline__ void sorted(int stage, int slab, const MoeTile& tile, int first,
                                         int step) const {
    const unsigned full = smem_address(&smem.full[stage]), to = smem_address(smem.x[stage]);
    const int depth = min(kDepth, num_slabs() - slab);
    for (int d = 0; d < depth; ++d)
      for (int row = first * kBoxRows; row < tile.count; row += step * kBoxRows)
        tma_load_2d(to + d * kSlabX + row * kSlabRowBytes, map_x, (slab + d) * kSlabK,
                    tile.first + row, full);
  }
};
