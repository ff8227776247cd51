// The producer warps of mla_decode_sm90: one copies tiles of keys to shared memory, one work tiles
// and their queries. Each runs the scheduler.
#pragma once

#include "common/pdl.cuh"
#include "mla_decode/mla_decode_config_sm90.cuh"

// Fetches `bytes` contiguous bytes to L2; both are multiples of 16.
__device__ __forceinline__ void bulk_prefetch(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Lane i copies box i of a tile. The block table is read 32 entries at a time, one batch ahead.
class KeyProducer {
 public:
  __device__ __forceinline__ KeyProducer(const MlaDecodeSm90Params& p, unsigned smem)
      : p_(p), ring_{smem} {
    tma_prefetch_map(&p.latent_map);
    tma_prefetch_map(&p.rope_map);
  }

  __device__ __forceinline__ void run() {
    const DecodeProblem problem = problem_of(p_);
    PersistentScheduler<kKeys> scheduler(problem);
    WorkTile work;
    bool is_first = true;
    while (scheduler.next(problem, work)) {
      const int* table = p_.block_tables + work.b * p_.table_stride;
      first_ = work.first_key >> p_.block_shift;
      ids_ = page_id(table, first_, work.num_keys);
      next_ids_ = page_id(table, first_ + kWarpSize, work.num_keys);
      if (is_first) pdl_wait();  // the preceding kernels write the newest keys
      is_first = false;
#pragma unroll 1
      for (int i = 0; i < work.num_tiles; ++i) {
        const int key = work.first_key + i * kKeys;
        if (((key + kKeys - 1) >> p_.block_shift) - first_ >= kWarpSize) {
          first_ += kWarpSize;
          ids_ = next_ids_;
          next_ids_ = page_id(table, first_ + kWarpSize, work.num_keys);
        }
        if (kPrefetched > 0 && i + kPrefetched < work.num_tiles)
          prefetch(key + kPrefetched * kKeys, work.num_keys);
        load_tile(key, work.num_keys, i % 2);
      }
    }
  }

 private:
  // Tiles that are fetched to L2 before a stage is free for them: shared memory alone holds too few
  // to hide the latency of memory.
  static constexpr int kPrefetched = PREFETCHED;
  static_assert((kPrefetched + 1) * kKeys <= 16 * kWarpSize, "the ids of their pages are at hand");

  const MlaDecodeSm90Params& p_;
  Ring ring_;
  unsigned tile_ = 0;   // number of tiles copied
  int first_;           // entry of the block table that lane 0 holds
  int ids_, next_ids_;  // the lane's entries, of the 32 from first_ on and of the next 32

  __device__ __forceinline__ static int lane_idx() { return threadIdx.x % kWarpSize; }

  // This lane's entry of a block table, of the 32 from `first` on. Only entries that hold keys are
  // read.
  __device__ __forceinline__ int page_id(const int* table, int first, int num_keys) const {
    const int64_t key = static_cast<int64_t>(first + lane_idx()) << p_.block_shift;
    return key < num_keys ? clamped_page(table[first + lane_idx()], p_.num_blocks) : 0;
  }

  // The lane's box of a tile: its first key, and its first group of 8 tokens in the pages.
  __device__ __forceinline__ static int box_key(int key) {
    return key + lane_idx() % kBoxes * kBoxKeys;
  }
  __device__ __forceinline__ int box_group(int key) const {
    const int entry = (key >> p_.block_shift) - first_;
    const int id = __shfl_sync(kFullMask, ids_, entry % kWarpSize);
    const int next_id = __shfl_sync(kFullMask, next_ids_, entry % kWarpSize);
    return (entry < kWarpSize ? id : next_id) * p_.page_groups +
           (key & ((1 << p_.block_shift) - 1)) / 8;
  }

  __device__ __forceinline__ void prefetch(int tile_key, int num_keys) const {
    const int key = box_key(tile_key);
    const int64_t group = box_group(key);
    if (key < num_keys && lane_idx() < kBoxes)
      bulk_prefetch(p_.pages + group * (8 * kWidth), kBoxKeys * kWidth * sizeof(scalar_t));
  }

  // Copies the boxes of a tile that hold any key of the sequence, in the order in which the tile's
  // owner needs the parts. The consumers clear the rest.
  __device__ __forceinline__ void load_tile(int tile_key, int num_keys, int owner) {
    const int key = box_key(tile_key);
    const int group = box_group(key);
    const bool is_valid = key < num_keys && lane_idx() < kBoxes;
    const int count = __popc(__ballot_sync(kFullMask, is_valid));
    load_part(p_.rope_map, kRopePart, 1, group, count, is_valid);
    load_part(p_.latent_map, owner, kHalfChunks, group, count, is_valid);
    load_part(p_.latent_map, owner ^ 1, kHalfChunks, group, count, is_valid);
    ++tile_;
  }

  __device__ __forceinline__ void load_part(const TensorMap& map, int part, int chunks, int group,
                                            int count, bool is_valid) {
    const int bytes = kBoxKeys * chunks * 128;
    ring_.wait_empty(tile_, part);
    if (lane_idx() == 0) mbarrier_arrive_expect_tx(ring_.full(tile_, part), count * bytes);
    __syncwarp();
    if (is_valid)
      tma_load_4d(ring_.part(tile_, part) + lane_idx() * bytes, &map, 0, 0, part * kHalfChunks,
                  group, ring_.full(tile_, part));
  }
};

// Publishes work tiles, each with its rows of Q; the last one has no key tiles. Rows past the end
// of Q arrive as zeros.
__device__ __forceinline__ void produce_queries(const MlaDecodeSm90Params& p,
                                                unsigned char* smem_bytes) {
  const unsigned smem = smem_address(smem_bytes);
  const int row = blockIdx.x * kRows;
  const bool is_first_lane = threadIdx.x % kWarpSize == 0;
  WorkTile* const slots = reinterpret_cast<WorkTile*>(smem_bytes + kWorkAt);
  tma_prefetch_map(&p.q_map);
  tma_prefetch_map(&p.q_rope_map);
  const DecodeProblem problem = problem_of(p);
  PersistentScheduler<kKeys> scheduler(problem);
  pdl_wait();  // the preceding kernels write the queries
  for (unsigned i = 0;; ++i) {
    WorkTile work{};
    const bool has_work = scheduler.next(problem, work);
    if (i > 0) mbarrier_wait(smem + kQEmptyAt, (i - 1) & 1);
    if (is_first_lane) {
      slots[i % 2] = work;
      if (has_work) {
        mbarrier_arrive_expect_tx(smem + kQFullAt, kQBytes);
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const bool is_rope = chunk == kChunks - 1;
          tma_load_3d(smem + chunk * kChunkBytes, is_rope ? &p.q_rope_map : &p.q_map,
                      is_rope ? 0 : chunk * 64, row, work.b, smem + kQFullAt);
        }
      } else {
        mbarrier_arrive(smem + kQFullAt);
      }
    }
    __syncwarp();
    if (!has_work) return;
  }
}
