// The producer warp of attention_decode_sm90: copies Q and tiles of K and V to shared memory.
#pragma once

#include "attention_decode/attention_decode_cta_sm90.cuh"
#include "attention_decode/attention_decode_pipeline_sm90.cuh"

// Lanes 0 to 7 copy the boxes of K, lanes 8 to 15 the boxes of V; all lanes copy rows of Q.
class Producer {
 public:
  __device__ __forceinline__ explicit Producer(const Cta& cta)
      : cta_(cta),
        ring_(smem_address(cta.smem)),
        queries_(smem_address(cta.smem)),
        map_(lane_idx() < 8 ? &cta.p.k_map : &cta.p.v_map),
        pages_(lane_idx() < 8 ? cta.p.k_pages : cta.p.v_pages) {
    if constexpr (kSwizzled) tma_prefetch_map(map_);
  }

  __device__ __forceinline__ void run(const WorkTile& work) {
    const RowRule rows = cta_.problem.rows(work.num_keys);
    const int begin = rows.first_key(0), end = work.num_keys;
    const int block_shift = cta_.p.block_shift;
    const int* table = cta_.table(work.b);
    int first = work.first_key >> block_shift;
    int ids = page_id(table, first, begin, end);
    int next_ids = page_id(table, first + kWarpSize, begin, end);
    if constexpr (!kNewToken) {
      pdl_wait();  // the preceding kernel may write the queries and the newest keys
      if constexpr (kCluster == 1) load_queries(cta_.queries(work.b), rows);
    }
#pragma unroll 1
    for (int i = 0; i < work.num_tiles; ++i) {
      const int key = work.first_key + i * kTileKeys;
      if (((key + kTileKeys - 1) >> block_shift) - first >= kWarpSize) {
        first += kWarpSize;
        ids = next_ids;
        next_ids = page_id(table, first + kWarpSize, begin, end);
      }
      const int box_key = key + lane_idx() % 8 * kBoxKeys;
      const int page = __shfl_sync(kFullMask, ids, ((box_key >> block_shift) - first) % kWarpSize);
      load_tile(page, box_key, begin, end);
    }
  }

 private:
  const Cta& cta_;
  Ring ring_;
  QueryRing queries_;
  const TensorMap* map_;  // tensor map of this lane's array, K or V
  const page_t* pages_;   // pages of this lane's array

  __device__ __forceinline__ static int lane_idx() { return threadIdx.x % kWarpSize; }

  // This lane's entry of a block table, out of the 32 from `first` on. Only entries of keys [begin,
  // end) are read.
  __device__ __forceinline__ int page_id(const int* table, int first, int begin, int end) const {
    const int block_shift = cta_.p.block_shift;
    const int64_t key = static_cast<int64_t>(first + lane_idx()) << block_shift;
    const bool is_valid = key < end && key + (1 << block_shift) > begin;
    return is_valid ? clamped_page(table[first + lane_idx()], cta_.p.num_blocks) : 0;
  }

  // Copies a work tile's rows of Q.
  __device__ __forceinline__ void load_queries(const Queries& from, const RowRule& rows) {
    queries_.wait_empty();
    if (lane_idx() == 0) mbarrier_arrive_expect_tx(queries_.full(), rows.count * kRowBytes);
    __syncwarp();
    for (int row = lane_idx(); row < rows.count; row += kWarpSize)
      bulk_load(queries_.q() + row * kQueryPitch,
                from.q + row / rows.group * from.token_stride + row % rows.group * from.head_stride,
                kRowBytes, queries_.full());
    queries_.advance();
  }

  // Copies the boxes of a tile that contain any of the keys [begin, end). Their other keys are
  // masked later.
  __device__ __forceinline__ void load_tile(int page, int box_key, int begin, int end) {
    const bool is_valid = box_key < end && box_key + kBoxKeys > begin && lane_idx() < 16;
    const unsigned bytes = __popc(__ballot_sync(kFullMask, is_valid)) / 2 * kBoxBytes;
    const int block_shift = cta_.p.block_shift;
    const int row = cta_.layout.row(page, cta_.kv_head(), box_key & ((1 << block_shift) - 1));
    const unsigned box = lane_idx() % 8 * kBoxPitch;
    ring_.wait_empty_k();
    if (lane_idx() == 0) mbarrier_arrive_expect_tx(ring_.full_k(), bytes);
    if (is_valid && lane_idx() < 8) load_box(ring_.k() + box, row, ring_.full_k());
    ring_.wait_empty_v();
    if (lane_idx() == 0) mbarrier_arrive_expect_tx(ring_.full_v(), bytes);
    if (is_valid && lane_idx() >= 8) load_box(ring_.v() + box, row, ring_.full_v());
    ring_.advance();
  }

  // Copies one box; `row` is the page row of its first token.
  __device__ __forceinline__ void load_box(unsigned to, int row, unsigned barrier) const {
    if constexpr (kSwizzled)
      tma_load_4d(to, map_, 0, 0, 0, row, barrier);
    else
      bulk_load(to, pages_ + cta_.layout.offset(row), kBoxBytes, barrier);
  }
};
