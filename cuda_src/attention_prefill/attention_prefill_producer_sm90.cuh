// The producer warps of attention_prefill_sm90: one fetches work tiles and loads their Q, one loads
// K and V, and two more help if pages are small.
#pragma once

#include "attention_prefill/attention_prefill_tile_sm90.cuh"

struct Producer {
  const SharedMemory& smem;
  const Problem& problem;

  // Warp 0: fetches work tiles from the counter and loads their Q. It fetches a tile as late as
  // possible, when a stage of Q is empty, since no other block can then compute it. With a single
  // stage it fetches the next tile while that stage is still in use.
  __device__ __forceinline__ void load_queries(const TensorMap* q_map) const {
    const int lane_idx = threadIdx.x % 32;
    unsigned tiles = 0;
    const auto wait_empty = [&] {
      wait_to_copy(smem.q_empty + tiles % kQStages * 8, tiles / kQStages % 2 ^ 1);
    };
    for (int t = blockIdx.x; t < problem.total;) {
      WorkTile tile;
      if (find_work_tile<kKeys>(problem, t, tile)) {
        if constexpr (kPattern) {
          const int last = tile.position + tile.tokens - 1;
          const TileWalk<kKeys, true> walk(problem.pattern, tile.position, last, tile.begin,
                                           tile.end);
          if (walk.n < tile.begin) tile.end = tile.begin;
        }
        if (kQStages == 1) wait_empty();
        if (lane_idx == 0) fill(q_map, tile, tiles % kQStages);
        ++tiles;
        if (kQStages > 1) wait_empty();
      }
      t = next_tile(lane_idx, t);
    }
    if (kQStages == 1) wait_empty();
    if (lane_idx == 0) {
      const int stage = tiles % kQStages;
      smem.work[stage].first_token = -1;
      mbarrier_arrive(smem.work_full + 8 * stage);
      mbarrier_arrive(smem.q_full + 8 * stage);
    }
  }

  // Warp 1: loads K and V. Like the consumers, it rereads the work tile from shared memory because
  // it has few registers.
  __device__ __forceinline__ void load_keys(const TensorMap* k_map, const TensorMap* v_map) const {
    const int lane_idx = threadIdx.x % 32;
    const bool is_helped = has_helpers(problem), is_dense = problem.block_tables == nullptr;
    PipelineState<kStages> ring(1);
    unsigned tiles = 0, tail_phase = 0;
    for (;; ++tiles) {
      mbarrier_wait(smem.work_full + tiles % kQStages * 8, tiles / kQStages % 2);
      const WorkTile& tile = smem.work[tiles % kQStages];
      if (tile.first_token < 0) break;
      TileWalk<kKeys, kPattern> walk(problem.pattern, tile.position,
                                     tile.position + tile.tokens - 1, tile.begin, tile.end);
      KeyTileRange range{};
      if constexpr (kPattern) range = key_tile_range<kKeys>(problem, tile, 0, tile.tokens - 1);
      int row = key_box_row<kKeys>(problem, tile, walk.n, lane_idx);
      while (walk.n >= tile.begin) {
        const int n = walk.n;
        const bool is_whole = walk.is_whole && n >= range.whole_begin && n < range.whole_end;
        walk.next();
        wait_to_copy(smem.k_empty + 8 * ring.stage, ring.phase);
        if (kPattern && lane_idx == 0)
          smem.key_tile[ring.stage] =
              n | (is_whole ? 0 : smem.kMasked) | (walk.n >= tile.begin ? smem.kMore : 0);
        const int head = is_dense ? tile.kv_head : 0;  // head coordinate in the tensor maps
        // TMA already fills rows past the end of the whole K and V arrays with zeros.
        const int valid = tile.num_keys - n * kKeys;
        const bool has_tail =
            valid < kKeys && (!is_dense || tile.k_begin + tile.num_keys < problem.max_keys);
        if (is_helped) ask_helpers(ring.stage, has_tail ? row | smem.kOnlyK : row, lane_idx);
        const int box = is_helped ? lane_idx * 3 : lane_idx;
        const int box_start = __shfl_sync(~0u, row, box % 32);
        const unsigned k_full = smem.k_full + 8 * ring.stage;
        if (lane_idx == 0) mbarrier_arrive_expect_tx(k_full, kKeyBytes);
        load_box<kChunks>(smem.k + ring.stage * kKeyBytes, k_map, head, box_start, box, k_full);
        const int next_row =
            walk.n >= tile.begin ? key_box_row<kKeys>(problem, tile, walk.n, lane_idx) : 0;
        wait_to_copy(smem.v_empty + 8 * ring.stage, ring.phase);
        const unsigned v_stage = smem.v + ring.stage * kValueBytes;
        const unsigned v_full = smem.v_full + 8 * ring.stage;
        if (lane_idx == 0)
          mbarrier_arrive_expect_tx(has_tail ? smem.v_tail : v_full, kValueBytes);
        else if (kFewRows && !has_tail)
          mbarrier_arrive(v_full);
        if (has_tail) {
          load_box<kValueChunks>(v_stage, v_map, head, row, lane_idx, smem.v_tail);
          mbarrier_wait(smem.v_tail, tail_phase);
          tail_phase ^= 1;
          zero_rows(v_stage, valid);
          if (kFewRows || lane_idx == 0) mbarrier_arrive(v_full);
        } else {
          load_box<kValueChunks>(v_stage, v_map, head, box_start, box, v_full);
        }
        ring.advance();
        row = next_row;
      }
      mbarrier_arrive(smem.q_empty + tiles % kQStages * 8);
    }
    if (is_helped) {
      mbarrier_wait(smem.k_empty + 8 * ring.stage, ring.phase);
      ask_helpers(ring.stage, smem.kStop, lane_idx);
    }
  }

  // Warps 2 and 3: each loads a third of the boxes.
  __device__ __forceinline__ void help(const TensorMap* k_map, const TensorMap* v_map) const {
    const int box = threadIdx.x % 32 * 3 + threadIdx.x / 32 % 4 - 1;
    for (PipelineState<kStages> ring(0);; ring.advance()) {
      wait_to_copy(smem.boxes_full + 8 * ring.stage, ring.phase);
      const int row = smem.boxes[ring.stage * kBoxes + min(box, kBoxes - 1)];
      if (row == smem.kStop) return;
      mbarrier_arrive(smem.k_empty + 8 * ring.stage);
      load_box<kChunks>(smem.k + ring.stage * kKeyBytes, k_map, 0, row & ~smem.kOnlyK, box,
                        smem.k_full + 8 * ring.stage);
      // SAFETY: only lanes that have a box to copy wait for v_empty. The ring does not wait for the
      // other lanes: it could advance by two phases before they test the mbarrier, and they would
      // deadlock.
      if (row >= 0 && box * problem.box_keys < kKeys) {
        wait_to_copy(smem.v_empty + 8 * ring.stage, ring.phase ^ 1);
        load_box<kValueChunks>(smem.v + ring.stage * kValueBytes, v_map, 0, row, box,
                               smem.v_full + 8 * ring.stage);
      }
    }
  }

 protected:
  // Waits for memory that the thread copies to. Consumers of few rows read it by ldmatrix.
  static __device__ __forceinline__ void wait_to_copy(unsigned barrier, unsigned phase) {
    if constexpr (kFewRows)
      mbarrier_wait_to_overwrite(barrier, phase);
    else
      mbarrier_wait(barrier, phase);
  }

  // Publishes the work tile in its stage and starts copying its Q.
  __device__ __forceinline__ void fill(const TensorMap* q_map, const WorkTile& tile,
                                       int stage) const {
    smem.work[stage] = tile;
    mbarrier_arrive(smem.work_full + 8 * stage);
    const unsigned barrier = smem.q_full + 8 * stage;
    mbarrier_arrive_expect_tx(barrier, problem.q_bytes);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      tma_load_4d(smem.q + stage * kQBytes + chunk * kQChunk, q_map, 64 * chunk, 0, tile.kv_head,
                  tile.first_token, barrier);
  }

  // Fetches the index of the next work tile from the launch's counter.
  __device__ __forceinline__ int next_tile(int lane_idx, int t) const {
    if (lane_idx == 0) {
      const int taken = atomicAdd(problem.counter, 1);
      if (taken == problem.total - 1) *problem.counter = 0;  // every block is past its last tile
      t = gridDim.x + taken;
    }
    return __shfl_sync(~0u, t, 0);
  }

  // Copies box `box` of a key tile, kCount chunks of columns; it starts at row `row` of the tensor
  // map.
  template <int kCount>
  __device__ __forceinline__ void load_box(unsigned to, const TensorMap* map, int head, int row,
                                           int box, unsigned barrier) const {
    if (box * problem.box_keys >= kKeys) return;
#pragma unroll
    for (int chunk = 0; chunk < kCount; ++chunk)
      tma_load_3d(to + chunk * kKeyChunk + box * problem.box_keys * 128, map, 64 * chunk, head, row,
                  barrier);
  }

  // Zeroes rows [begin, kKeys) of a tile of V: P is 0 there, but 0 * NaN would reach the sum.
  static __device__ __forceinline__ void zero_rows(unsigned to, int begin) {
    unsigned lane_idx;  // reread: derived values would occupy registers throughout the loop
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_idx));
    for (int chunk = 0; chunk < kValueChunks; ++chunk)
      for (int row = begin + lane_idx / 8; row < kKeys; row += 4)
        st_shared_v4(to + chunk * kKeyChunk + row * 128 + lane_idx % 8 * 16, 0u, 0u, 0u, 0u);
    fence_async_proxy();
    __syncwarp();
  }

  // Passes the start rows of a stage's boxes to the helper warps.
  __device__ __forceinline__ void ask_helpers(int stage, int row, int lane_idx) const {
    if (lane_idx >= kBoxes) return;
    smem.boxes[stage * kBoxes + lane_idx] = row;
    mbarrier_arrive(smem.boxes_full + 8 * stage);
  }
};
