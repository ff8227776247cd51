// The producer of moe_gemm_sm90.cu: one warpgroup that fills the ring of stages.
#pragma once

#include "common/pdl.cuh"
#include "common/pipeline_state.cuh"
#include "gemm/moe_scheduler_sm90.cuh"

// Weights come by TMA, and so does x where it is sorted. Rows that are gathered through `order` are
// copied by cp.async, 16 bytes a thread: TMA takes too long over boxes of one row. Rows of a stage
// that no copy writes keep what shared memory held: their sums are dropped.
struct MoeLoader {
  MoeShared& smem;
  const TensorMap *map_w, *map_x;
  const scalar_t* x;  // (T, k), gathered
  const int* order;
  const float* pair_weights;  // null: x is gathered
  int k, top_k, num_gates, rank;

  static constexpr int kChunks = kSlabRowBytes / 16;
  static constexpr int kRowStep = kProducerThreads / kChunks;
  static constexpr int kRows = kTokens / kRowStep;
  static_assert(kRowStep % 8 == 0, "a thread's rows have the same swizzle");
  int rows[kRows];  // of x, of which this thread copies a chunk; -1: none

  __device__ __forceinline__ int thread() const { return threadIdx.x % kProducerThreads; }
  __device__ __forceinline__ bool is_gathered() const { return pair_weights == nullptr; }
  __device__ __forceinline__ int num_slabs() const { return (k + kSlabK - 1) / kSlabK; }

  __device__ __forceinline__ void begin(const MoeTile& tile) {
    if (!is_gathered()) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread() / kChunks + i * kRowStep;
      rows[i] = row < tile.count ? order[tile.first + row] / top_k : -1;
    }
  }

  // By all warps but the first.
  __device__ __forceinline__ void tell(const MoeTile& tile, PipelineState<kSlots>& slot) const {
    if (thread() < kWarpSize) return;
    mbarrier_wait(smem_address(&smem.slot_empty[slot.stage]), slot.phase);
    MoeSlot& to = smem.slots[slot.stage];
    if (thread() == kWarpSize) to.tile = tile;
    if (!is_gathered())
      for (int i = thread() - kWarpSize; i < tile.count; i += kSlotWriters) {
        const int pair = order[tile.first + i];
        to.rows[i] = pair;
        to.weights[i] = pair_weights[pair];
      }
    mbarrier_arrive(smem_address(&smem.slot_full[slot.stage]));
    slot.advance();
  }

  // The first row of the weight in an m-tile.
  __device__ __forceinline__ int row_of(const MoeTile& tile, int part) const {
    if (num_gates == 0) return tile.row + part * kMmaM;
    return tile.row + part / 2 * kMmaM + part % 2 * num_gates;
  }

  // By one thread, also what is said of the stage's bytes.
  __device__ __forceinline__ void weight(int stage, int slab, const MoeTile& tile) const {
    const unsigned full = smem_address(&smem.full[stage]);
    const int depth = min(kDepth, num_slabs() - slab);
    const int x_rows = !is_gathered() ? (tile.count + kBoxRows - 1) / kBoxRows * kBoxRows : 0;
    mbarrier_arrive_expect_tx(full, depth * (kSlabW + x_rows * kSlabRowBytes));
    for (int d = 0; d < depth; ++d)
#pragma unroll
      for (int i = 0; i < kPartsW / kCluster; ++i) {
        const int part = rank * (kPartsW / kCluster) + i, row = row_of(tile, part);
        const unsigned to = smem_address(smem.w[stage]) + d * kSlabW + part * kMmaBytes;
        if constexpr (kCluster == 1)
          tma_load_3d(to, map_w, (slab + d) * kSlabK, row, tile.expert, full);
        else
          tma_load_3d_multicast(to, map_w, (slab + d) * kSlabK, row, tile.expert, full,
                                (1 << kCluster) - 1);
      }
  }

  // Brings the weight to the L2 cache only.
  __device__ __forceinline__ void prefetch(int slab, const MoeTile& tile) const {
#pragma unroll
    for (int i = 0; i < kPartsW / kCluster; ++i)
      tma_prefetch_3d(map_w, slab * kSlabK, row_of(tile, rank * (kPartsW / kCluster) + i),
                      tile.expert);
  }

  // By all threads: rows that are gathered.
  __device__ __forceinline__ void gather(int stage, int slab) const {
    const int row = thread() / kChunks, chunk = thread() % kChunks;
    unsigned char* to = smem.x[stage] + row * kSlabRowBytes + ((chunk ^ (row & 7)) << 4);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int column = (slab + d) * kSlabK;
      if (d > 0 && column >= k) break;
      const bool exists = column + chunk * kVec < k;  // else zeros
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (rows[i] < 0) continue;
        const scalar_t* from = x + static_cast<int64_t>(rows[i]) * k + column + chunk * kVec;
        cp_async_16(to + d * kSlabX + i * kRowStep * kSlabRowBytes, exists ? from : x, exists);
      }
    }
    mbarrier_arrive_cp_async(smem_address(&smem.full[stage]));
  }

  // By one thread: sorted rows.
  __device__ __forceinline__ void sorted(int stage, int slab, const MoeTile& tile) const {
    const unsigned full = smem_address(&smem.full[stage]), to = smem_address(smem.x[stage]);
    const int depth = min(kDepth, num_slabs() - slab);
    for (int d = 0; d < depth; ++d)
      for (int row = 0; row < tile.count; row += kBoxRows)
        tma_load_2d(to + d * kSlabX + row * kSlabRowBytes, map_x, (slab + d) * kSlabK,
                    tile.first + row, full);
  }
};

// Runs ahead of the loads, through this tile and the next.
struct MoePrefetcher {
  const MoeLoader& load;
  const MoeScheduler& scheduler;
  int index, count, slab = 0;
  MoeTile tile;

  __device__ __forceinline__ MoePrefetcher(const MoeLoader& load, const MoeScheduler& scheduler)
      : load(load),
        scheduler(scheduler),
        index(MoeScheduler::first()),
        count(scheduler.count()) {
    if (index < count) tile = scheduler.tile(index);
  }
  __device__ __forceinline__ void advance() {
    if (index >= count) return;
    load.prefetch(slab, tile);
    if (++slab < load.num_slabs()) return;
    slab = 0;
    index += MoeScheduler::step();
    if (index < count) tile = scheduler.tile(index);
  }
};

// With `is_early` the first tile's weights are loaded before the preceding kernel has ended, as far
// as the ring has room; it then waits for that kernel, and lets the next one start.
__device__ __forceinline__ void produce(MoeShared& smem, MoeLoader& load,
                                        const MoeScheduler& scheduler, bool is_early) {
  const int count = scheduler.count(), first = MoeScheduler::first();
  const bool is_first = load.thread() == 0;
  int early = 0;
  if (is_early) {
    if (first < count) {
      const MoeTile tile = scheduler.tile(first);
      early = min(kStages, (load.num_slabs() + kDepth - 1) / kDepth);
      if (is_first)
        for (int i = 0; i < early; ++i) load.weight(i, i * kDepth, tile);
    }
    pdl_wait();
  }
  pdl_trigger();
  static_assert(kAhead == 0 || kDepth == 1, "a slab is prefetched for each that is loaded");
  MoePrefetcher prefetcher(load, scheduler);
  if (is_first)
    for (int i = 0; i < kAhead; ++i) prefetcher.advance();
  PipelineState<kStages> state(1);
  PipelineState<kSlots> slot(1);
#pragma unroll 1
  for (int index = first; index < count; index += MoeScheduler::step()) {
    const MoeTile tile = scheduler.tile(index);
    load.tell(tile, slot);
    if (!load.is_gathered() && !is_first) continue;
    load.begin(tile);
#pragma unroll 1
    for (int slab = 0; slab < load.num_slabs(); slab += kDepth) {
      if (early > 0) {
        --early;
      } else {
        mbarrier_wait(smem_address(&smem.empty[state.stage]), state.phase);
        if (is_first) load.weight(state.stage, slab, tile);
        if (kAhead > 0 && is_first) prefetcher.advance();
      }
      if (load.is_gathered())
        load.gather(state.stage, slab);
      else
        load.sorted(state.stage, slab, tile);
      state.advance();
    }
  }
}
