// Configuration of mla_decode_sm90: parameters, and a CTA's threads and shared memory.
//
// Macros: the attributes of HopperTile in engine/kernels/mla_decode/sm90.py.
#pragma once

#include "common/attention_sm90.cuh"
#include "common/decode_scheduler.cuh"
#include "common/pdl.cuh"
#include "mla_decode/mla_decode_problem.cuh"

struct MlaDecodeSm90Params {
  TensorMap page_map;       // (groups of 8 tokens, chunks of 64 values, 8 tokens, 64 values)
  const scalar_t* q;        // (B, Q, H, L) queries multiplied by the keys' up-projection
  const scalar_t* q_rope;   // (B, Q, H, R) rotated queries
  const int* block_tables;  // (B, NB) only entries within context_lens are read
  const int* context_lens;  // (B,) number of keys per sequence, including the Q new ones
  scalar_t* out;            // (B, Q, H, L)
  float* lse;               // (B, Q, H) contiguous, or null
  float* partial_o;         // (partials, rows, L) sums of P V, one per split
  float* partial_stats;     // (partials, rows, 2) base (log2) and sum of P per split
  int4* splits;             // (B,) SplitList, written here, read by mla_decode_combine
  int64_t q_stride_b, q_stride_t, q_stride_h;  // in elements, like all strides
  int64_t q_rope_stride_b, q_rope_stride_t, q_rope_stride_h;
  int64_t out_stride_b, out_stride_t, out_stride_h;
  int64_t table_stride;
  int64_t max_keys;                   // NB * block_size
  int batch, num_queries, num_heads;  // B, Q, H
  int row_tiles;                      // ceil(Q * H / kRows)
  int block_shift, num_blocks;        // log2(block_size), P
  int page_groups;                    // groups of 8 tokens from one page to the next
  int num_splits;                     // splits per sequence; 0: equal work for all CTAs
  float score_factor;                 // scale * log2(e)
};

// ---- tiles -------------------------------------------------------------------------------------

constexpr int kStages = STAGES;
constexpr int kRows = 64, kKeys = 64;     // rows of Q and keys of a tile
constexpr int kBoxKeys = BOX_KEYS;        // keys per TMA box: the page size, at most kKeys
constexpr int kBoxes = kKeys / kBoxKeys;  // boxes per tile
constexpr int kChunks = kWidth / 64;      // chunks of 64 values, 128 bytes
constexpr int kColumns = kLatent / 2;     // columns of O per consumer warpgroup
static_assert(kLatent % 128 == 0 && kRope % 64 == 0, "whole chunks for each warpgroup");

// ---- warps -------------------------------------------------------------------------------------

// Two consumer warpgroups, then the producer's, which needs one warp and releases its registers.
constexpr int kGroupThreads = 128;  // threads of a warpgroup
constexpr int kConsumerThreads = 2 * kGroupThreads, kThreads = kConsumerThreads + kGroupThreads;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * 168, "see attention_decode");

// ---- shared memory: byte offsets ---------------------------------------------------------------
//
//   Q | stages | P and statistics that the warpgroups exchange | mbarriers | consumers' schedule
//
// Q: kChunks blocks of kRows rows of 128 bytes, swizzled. A stage: 8 groups of 8 keys; a group has
// kChunks blocks of 8 rows of 128 bytes, swizzled by TMA.
constexpr int kChunkBytes = kRows * 128;
constexpr int kKeyGroupBytes = kChunks * 1024, kTileBytes = 8 * kKeyGroupBytes;
constexpr int kBoxBytes = kBoxKeys / 8 * kKeyGroupBytes;
constexpr int kStagesAt = kChunks * kChunkBytes;
constexpr int kExchangeAt = kStagesAt + kStages * kTileBytes;
constexpr int kExchangeBytes =
    kGroupThreads * (kKeys / 2 * 2 + 16);  // P; base and factor of 2 rows
constexpr int kBarriersAt = kExchangeAt + kExchangeBytes;
constexpr int kScheduleAt = kBarriersAt + 2 * kStages * 8, kScheduleBytes = 96;
constexpr int kSharedBytes = kScheduleAt + kScheduleBytes;
static_assert(kSharedBytes == SHARED_BYTES, "HopperTile.shared_bytes computes another size");
static_assert(kSharedBytes <= 227 * 1024, "more than an SM has");

// The stages, by the number of a tile since the CTA's start.
struct Ring {
  unsigned smem;

  // One thread calls it; a block barrier must follow.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), kConsumerThreads / kWarpSize);
    }
    mbarrier_init_fence();
  }
  __device__ __forceinline__ unsigned tile(unsigned i) const {
    return smem + kStagesAt + i % kStages * kTileBytes;
  }
  __device__ __forceinline__ unsigned full(unsigned i) const {
    return smem + kBarriersAt + i % kStages * 8;
  }
  __device__ __forceinline__ unsigned empty(unsigned i) const { return full(i) + kStages * 8; }
  __device__ __forceinline__ void wait_full(unsigned i) const {
    mbarrier_wait(full(i), i / kStages & 1);
  }
  __device__ __forceinline__ void wait_empty(unsigned i) const {
    mbarrier_wait(empty(i), i / kStages & 1 ^ 1);
  }
  // A warp has finished with the tile.
  __device__ __forceinline__ void release(unsigned i) const {
    if (elect_one()) mbarrier_arrive(empty(i));
  }
};

using Scheduler = PersistentScheduler<kKeys>;

// The consumers' scheduler and work tile. One warp calls the functions.
struct Schedule {
  Scheduler scheduler;
  WorkTile work;
  bool has_work;

  __device__ __forceinline__ void start(const DecodeProblem& problem) {
    const Scheduler started(problem);
    __syncwarp();
    scheduler = started;
  }
  __device__ __forceinline__ void next(const DecodeProblem& problem) {
    __syncwarp();  // SAFETY: all lanes have read the scheduler before any of them writes it.
    Scheduler advanced = scheduler;
    WorkTile found;
    const bool has_found = advanced.next(problem, found);
    __syncwarp();
    scheduler = advanced;
    if (has_found) work = found;
    has_work = has_found;
  }
};
static_assert(sizeof(Schedule) <= kScheduleBytes, "see kScheduleAt");
