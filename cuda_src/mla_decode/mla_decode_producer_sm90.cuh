// The producer warp of mla_decode_sm90: copies tiles of keys to shared memory.
#pragma once

#include "mla_decode/mla_decode_config_sm90.cuh"

// Lane i copies box i of a tile. The block table is read 32 entries at a time, one batch ahead.
class Producer {
 public:
  __device__ __forceinline__ Producer(const MlaDecodeSm90Params& p, unsigned smem)
      : p_(p), ring_{smem} {
    tma_prefetch_map(&p.page_map);
  }

  __device__ __forceinline__ void run(const WorkTile& work) {
    const int* table = p_.block_tables + work.b * p_.table_stride;
    int first = work.first_key >> p_.block_shift;
    int ids = page_id(table, first, work.num_keys);
    int next_ids = page_id(table, first + kWarpSize, work.num_keys);
#pragma unroll 1
    for (int i = 0; i < work.num_tiles; ++i) {
      const int key = work.first_key + i * kKeys;
      if (((key + kKeys - 1) >> p_.block_shift) - first >= kWarpSize) {
        first += kWarpSize;
        ids = next_ids;
        next_ids = page_id(table, first + kWarpSize, work.num_keys);
      }
      const int box_key = key + lane_idx() % kBoxes * kBoxKeys;
      const int page =
          __shfl_sync(kFullMask, ids, ((box_key >> p_.block_shift) - first) % kWarpSize);
      load_tile(page, box_key, work.num_keys);
    }
  }

 private:
  const MlaDecodeSm90Params& p_;
  Ring ring_;
  unsigned tile_ = 0;  // number of tiles copied

  __device__ __forceinline__ static int lane_idx() { return threadIdx.x % kWarpSize; }

  // This lane's entry of a block table, of the 32 from `first` on. Only entries that hold keys are
  // read.
  __device__ __forceinline__ int page_id(const int* table, int first, int num_keys) const {
    const int64_t key = static_cast<int64_t>(first + lane_idx()) << p_.block_shift;
    return key < num_keys ? clamped_page(table[first + lane_idx()], p_.num_blocks) : 0;
  }

  // Copies the boxes of a tile that hold any key of the sequence. The consumers clear the rest.
  __device__ __forceinline__ void load_tile(int page, int box_key, int num_keys) {
    const bool is_valid = box_key < num_keys && lane_idx() < kBoxes;
    const int count = __popc(__ballot_sync(kFullMask, is_valid));
    const int group = page * p_.page_groups + (box_key & ((1 << p_.block_shift) - 1)) / 8;
    ring_.wait_empty(tile_);
    if (lane_idx() == 0) mbarrier_arrive_expect_tx(ring_.full(tile_), count * kBoxBytes);
    __syncwarp();
    if (is_valid)
      tma_load_4d(ring_.tile(tile_) + lane_idx() * kBoxBytes, &p_.page_map, 0, 0, 0, group,
                  ring_.full(tile_));
    ++tile_;
  }
};
