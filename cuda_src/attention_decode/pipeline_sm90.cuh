// What passes between the warps of attention_decode_sm90: the ring of K and V, the buffers of Q, and
// each warp's schedule.
#pragma once

#include "attention_decode/config_sm90.cuh"
#include "attention_decode/scheduler_sm90.cuh"

using Scheduler = SchedulerOf<kTileKeys, kCluster>::Type;

// ---- how a tile lies in shared memory ----------------------------------------------------------

// The offset of 16-byte word `word` of a tile's row `index`, such that ldmatrix, which reads a word of
// 8 consecutive rows at once, finds them in 8 different banks.
//
// Swizzled by TMA: a box is its rows' first 128 bytes, then their second 128 bytes (D = 128), and
// within each the number of a word is xored with that of its row. A row's index is its key's place.
// Else a box lies as in memory, boxes are 16 bytes more than a multiple of 128 apart, and 8
// consecutive rows are the same row of the 8 boxes.
__device__ __forceinline__ unsigned tile_offset(int index, int word) {
  if constexpr (!kSwizzled) return index % 8 * kBoxPitch + index / 8 * kRowBytes + word * 16;
  const int row = index % kBoxKeys;
  return index / kBoxKeys * kBoxBytes + word / 8 * (kBoxKeys * 128) + row * 128 +
         (word ^ row) % 8 * 16;
}
// The place among the tile's keys of the row `index`, and the inverse.
__device__ __forceinline__ int key_of(int index) {
  return kSwizzled ? index : index % 8 * kBoxKeys + index / 8;
}
__device__ __forceinline__ int index_of(int key) {
  return kSwizzled ? key : key % kBoxKeys * 8 + key / kBoxKeys;
}

// ldmatrix (see mma.cuh) from an address in shared memory.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// ---- pipelines ---------------------------------------------------------------------------------

// One side of the ring of stages: its stage index and phase. A stage has a full and an empty
// mbarrier for K and for V each. Addresses are those of shared memory.
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(unsigned smem) : smem_(smem) {}

  // By one thread, before a block barrier.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int kind = 0; kind < 2; ++kind) mbarrier_init(barrier(kind, stage), 1);
      // SAFETY: every consumer lane arrives. One arrival a warp, after __syncwarp, would do and is as
      // fast, but compute-sanitizer then reports the other lanes' reads as races.
      for (int kind = 2; kind < 4; ++kind) mbarrier_init(barrier(kind, stage), kConsumers);
    }
    mbarrier_init_fence();
  }

  __device__ __forceinline__ unsigned k() const { return smem_ + stage_ * kTileBytes; }
  __device__ __forceinline__ unsigned v() const { return k() + kStages * kTileBytes; }
  __device__ __forceinline__ unsigned full_k() const { return barrier(0, stage_); }
  __device__ __forceinline__ unsigned full_v() const { return barrier(1, stage_); }
  __device__ __forceinline__ unsigned empty_k() const { return barrier(2, stage_); }
  __device__ __forceinline__ unsigned empty_v() const { return barrier(3, stage_); }

  __device__ __forceinline__ void wait_full_k() const { mbarrier_wait(full_k(), phase_); }
  __device__ __forceinline__ void wait_full_v() const { mbarrier_wait(full_v(), phase_); }
  __device__ __forceinline__ void wait_empty_k() const {
    mbarrier_wait_to_overwrite(empty_k(), phase_ ^ 1);
  }
  __device__ __forceinline__ void wait_empty_v() const {
    mbarrier_wait_to_overwrite(empty_v(), phase_ ^ 1);
  }

  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  unsigned smem_;
  int stage_ = 0;
  unsigned phase_ = 0;

  __device__ __forceinline__ unsigned barrier(int kind, int stage) const {
    return smem_ + kBarriersAt + (kind * kStages + stage) * 8;
  }
};

// One side of the buffers of Q and of the new token's key and value: a stage for each work tile.
class QueryRing {
 public:
  __device__ __forceinline__ explicit QueryRing(unsigned smem) : smem_(smem) {}

  // By one thread, before the ring's init(), whose fence covers these mbarriers too.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kQueryBuffers; ++i) {
      mbarrier_init(barrier(0, i), kHasNewTokenWarps ? kNewTokenThreads : 1);
      mbarrier_init(barrier(1, i), kConsumers);
    }
  }

  // Offsets in shared memory.
  __device__ __forceinline__ int q_at() const { return kQueriesAt + buffer_ * kQueryBytes; }
  __device__ __forceinline__ int new_kv_at() const { return kNewKvAt + buffer_ * kNewKvBytes; }

  __device__ __forceinline__ unsigned q() const { return smem_ + q_at(); }
  __device__ __forceinline__ unsigned full() const { return barrier(0, buffer_); }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), phase_); }
  __device__ __forceinline__ void wait_empty() const {
    if constexpr (kHasNewTokenWarps)
      mbarrier_wait(barrier(1, buffer_), phase_ ^ 1);
    else
      mbarrier_wait_to_overwrite(barrier(1, buffer_), phase_ ^ 1);
  }
  __device__ __forceinline__ void release() {
    mbarrier_arrive(barrier(1, buffer_));
    advance();
  }
  __device__ __forceinline__ void advance() {
    if (++buffer_ == kQueryBuffers) {
      buffer_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  unsigned smem_;
  int buffer_ = 0;
  unsigned phase_ = 0;

  __device__ __forceinline__ unsigned barrier(int kind, int buffer) const {
    return smem_ + kBarriersAt + (4 * kStages + kind * kQueryBuffers + buffer) * 8;
  }
};

// ---- schedules ---------------------------------------------------------------------------------

// The scheduler and work tile of a consumer or new-token warp. They lie in shared memory: the inner
// loop needs the registers.
struct WarpSchedule {
  Scheduler scheduler;
  WorkTile work;

  // Takes the next work tile; false: there is none.
  __device__ __forceinline__ bool next(const DecodeProblem& problem) {
    __syncwarp();  // SAFETY: all lanes have read the scheduler before one of them writes it.
    Scheduler advanced = scheduler;
    WorkTile found;
    const bool has_work = advanced.next(problem, found);
    __syncwarp();
    scheduler = advanced;
    if (has_work) work = found;
    __syncwarp();
    return has_work;
  }
};
static_assert(sizeof(WarpSchedule) <= kScheduleBytes, "see kScheduleAt");

// This warp's. The producer warp, which lies between the consumer and the new-token warps, has none.
__device__ __forceinline__ WarpSchedule& warp_schedule(unsigned char* smem) {
  const int warp = threadIdx.x / kWarpSize;
  return reinterpret_cast<WarpSchedule*>(smem + kScheduleAt)[warp - (warp > kConsumerWarps)];
}

// ---- what all warps of a CTA know ---------------------------------------------------------------

// Where tokens lie in the pages: slot = id of a page * its size + offset.
struct PageLayout {
  int block_shift, num_blocks, num_kv_heads;

  // The slot of a key of a sequence. SAFETY: an id outside the cache is clamped, as the copies do.
  __device__ __forceinline__ int64_t slot(const int* table, int key) const {
    const unsigned page = min(static_cast<unsigned>(table[key >> block_shift]),
                              static_cast<unsigned>(num_blocks - 1));
    return (static_cast<int64_t>(page) << block_shift) + (key & ((1 << block_shift) - 1));
  }
  // The row of the pages (rows of D) of a slot's head; -1: the slot is outside the pages.
  __device__ __forceinline__ int64_t row(int64_t slot, int kv_head) const {
    if (slot < 0 || slot >= static_cast<int64_t>(num_blocks) << block_shift) return -1;
    const int64_t page = slot >> block_shift;
    return (((page * num_kv_heads) + kv_head) << block_shift) + (slot & ((1 << block_shift) - 1));
  }
};

struct Cta {
  const AttentionDecodeSm90Params& p;
  unsigned char* smem;
  int group, token_parts;
  int kv_head, head;  // its key/value head, and the first query head of that group
  DecodeProblem problem;
  PageLayout layout;

  __device__ __forceinline__ Cta(const AttentionDecodeSm90Params& p, unsigned char* smem)
      : p(p),
        smem(smem),
        group(p.num_heads / p.num_kv_heads),
        token_parts(kCluster > 1 ? p.token_parts : 1),  // a constant: divisions by it are free
        kv_head(kCluster > 1 ? blockIdx.x / kCluster % p.num_kv_heads
                             : blockIdx.x % p.num_kv_heads),
        head(kv_head * group),
        problem{p.context_lens, p.max_keys, p.batch,      p.num_kv_heads, p.num_queries,
                group,          p.window,   p.num_splits, token_parts},
        layout{p.block_shift, p.num_blocks, p.num_kv_heads} {}

  __device__ __forceinline__ const int* table(int b) const {
    return p.block_tables + b / token_parts * p.table_stride;
  }
  __device__ __forceinline__ Queries queries(int b) const {
    const int sequence = b / token_parts, token = b % token_parts * p.num_queries;
    return Queries{p.q + sequence * p.q_stride_b + token * p.q_stride_t + head * p.q_stride_h,
                   p.q_stride_t, p.q_stride_h, kHeadDim, true};
  }
  __device__ __forceinline__ Output output(int b) const {
    const int64_t lse_begin = static_cast<int64_t>(b) * p.num_queries * p.num_heads + head;
    const int sequence = b / token_parts, token = b % token_parts * p.num_queries;
    return Output{
        p.out + sequence * p.out_stride_b + token * p.out_stride_t + head * p.out_stride_h,
        p.out_stride_t,
        p.out_stride_h,
        p.lse == nullptr ? nullptr : p.lse + lse_begin,
        p.num_heads,
        group,
        kHeadDim,
        true};
  }
  // What the rows of a work tile see.
  __device__ __forceinline__ RowRule rows(const WorkTile& work) const {
    RowRule rows = problem.rows(work.num_keys);
    if (p.tree_masks != nullptr) {
      rows.tree = p.tree_masks + static_cast<int64_t>(work.b) * p.num_queries;
      rows.earlier = work.b % token_parts * p.num_queries;
    }
    return rows;
  }
};
