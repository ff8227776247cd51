// The producer warpgroup of moe_wgrad_sm90.cu.
//
// cp.async copies the gathered rows of A. TMA loads whole slabs of B, half of them by each CTA of
// the cluster, for both. An expert's last slab, if it is not whole, is copied by cp.async, too: TMA
// would load the next expert's rows, where zeros must be.
#pragma once

#include "moe_wgrad/moe_wgrad_config_sm90.cuh"

constexpr int kPiecesOfRow = 8;  // pieces of 16 bytes in a row of a chunk
constexpr int kRowStep = kProducerThreads / kPiecesOfRow;
constexpr int kRowsOfThread = kSlabRows / kRowStep;

// Rows of a slab that a producer thread copies: first + i * kRowStep.
struct SlabRows {
  static __device__ __forceinline__ int thread() { return threadIdx.x % kProducerThreads; }
  static __device__ __forceinline__ int first() { return thread() / kPiecesOfRow; }

  int rows[kRowsOfThread];  // in the operand's matrix
};

// Loads the pairs of the slab that begins at sorted index `place`. They are not used yet, so
// the loads are in flight while another slab is copied.
__device__ __forceinline__ SlabRows load_pairs(const PairRows& operand, int place) {
  SlabRows pairs;
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i)
    pairs.rows[i] =
        __ldg(operand.order + min(place + SlabRows::first() + i * kRowStep, operand.num_pairs - 1));
  return pairs;
}

// Returns the pairs' tokens.
__device__ __forceinline__ SlabRows tokens_of(const PairRows& operand, SlabRows pairs) {
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i)
    pairs.rows[i] = min(max(pairs.rows[i], 0), operand.num_pairs - 1) / operand.top_k;
  return pairs;
}

// Returns the rows of a slab of the sorted operand.
__device__ __forceinline__ SlabRows sorted_rows(int place) {
  SlabRows sorted;
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) sorted.rows[i] = place + SlabRows::first() + i * kRowStep;
  return sorted;
}

// Copies kChunks chunks of a slab with `left` rows by cp.async, 16 bytes of each row and chunk per
// thread. Rows from `left` on, and columns from the operand's width on, become zero.
template <int kChunks>
__device__ __forceinline__ void copy_slab(unsigned smem, const PairRows& operand,
                                          const SlabRows& from_rows, int left, int col0) {
  const int piece = SlabRows::thread() % kPiecesOfRow, first_row = SlabRows::first();
  const unsigned to = smem + first_row * 128 + ((piece ^ (first_row & 7)) << 4);
  const int column = col0 + piece * 8;
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const scalar_t* from =
        operand.matrix + static_cast<int64_t>(from_rows.rows[i]) * operand.width + column;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const bool exists =
          first_row + i * kRowStep < left && column + c * kChunkColumns < operand.width;
      cp_async_16(to + c * kChunkBytes + i * kRowStep * 128,
                  exists ? from + c * kChunkColumns : operand.matrix, exists);
    }
  }
}

// Loads this CTA's half of B for the whole cluster. Called by one thread.
__device__ __forceinline__ void load_half(unsigned b, const TensorMap* map, int rank, int row,
                                          int col0, unsigned full) {
  constexpr int kHalf = kChunksB / kCluster;
  constexpr unsigned short kAll = (1 << kCluster) - 1;
  mbarrier_arrive_expect_tx(full, kBytesB);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const int c = rank * kHalf + i;
    tma_load_2d_multicast(b + c * kChunkBytes, map, col0 + c * kChunkColumns, row, full, kAll);
  }
}

// Loads the slabs of one tile; `a` is gathered, `b` sorted.
__device__ __forceinline__ void load_tile(WgradShared& smem, const TensorMap* map,
                                          const WgradTile& tile, const ExpertRows& rows, int rank,
                                          const PairRows& a, const PairRows& b,
                                          PipelineState<kStages>& state) {
  SlabRows tokens = tokens_of(a, load_pairs(a, rows.first));
#pragma unroll 1
  for (int row = 0; row < rows.count; row += kSlabRows, state.advance()) {
    const int left = rows.count - row, stage = state.stage;
    const unsigned full = smem_address(&smem.full[stage]), to_b = smem_address(smem.b[stage]);
    const SlabRows next = load_pairs(a, rows.first + row + kSlabRows);
    mbarrier_wait(smem_address(&smem.empty[stage]), state.phase);
    if (left >= kSlabRows) {
      if (SlabRows::thread() == 0) load_half(to_b, map, rank, rows.first + row, tile.b, full);
    } else {
      if (SlabRows::thread() == 0) mbarrier_arrive(full);
      copy_slab<kChunksB>(to_b, b, sorted_rows(rows.first + row), left, tile.b);
    }
    copy_slab<kChunksA>(smem_address(smem.a[stage]), a, tokens, left, tile.a);
    mbarrier_arrive_cp_async(full);
    tokens = tokens_of(a, next);
  }
}

__device__ __forceinline__ void produce(WgradShared& smem, const MoeWgradSm90Params& p) {
  const PairRows dy{p.dy, p.order, p.num_rows, p.num_pairs, p.top_k};
  const PairRows x{p.x, p.order, p.k, p.num_pairs, p.top_k};
  const WgradScheduler scheduler(p);
  PipelineState<kStages> state(1);
#pragma unroll 1
  for (int index = scheduler.first(); index < scheduler.count; index += scheduler.step()) {
    const WgradTile tile = scheduler.tile(index);
    load_tile(smem, &p.map_sorted, tile, ExpertRows(p.offsets, tile.expert, p.num_pairs),
              scheduler.rank, kGathersX ? x : dy, kGathersX ? dy : x, state);
  }
}
