// Configuration of mla_decode_sm90: parameters, and a CTA's threads and shared memory.
//
// Macros: the attributes of HopperTile in engine/kernels/mla_decode/sm90.py.
#pragma once

#include "common/attention_sm90.cuh"
#include "common/decode_scheduler.cuh"
#include "common/pdl.cuh"
#include "mla_decode/mla_decode_problem.cuh"

struct MlaDecodeSm90Params {
  TensorMap latent_map;     // (groups of 8 tokens, chunks of 64 values, 8 tokens, 64 values)
  TensorMap rope_map;       // the same array; its boxes hold one chunk, the other's half of L
  TensorMap q_map;          // (B, Q H, L) queries multiplied by the keys' up-projection
  TensorMap q_rope_map;     // (B, Q H, R) rotated queries
  const scalar_t* pages;    // (P, block_size, L + R)
  const int* block_tables;  // (B, NB) only entries within context_lens are read
  const int* context_lens;  // (B,) number of keys per sequence, including the Q new ones
  scalar_t* out;            // (B, Q, H, L)
  float* lse;               // (B, Q, H) contiguous, or null
  float* partial_o;         // (partials, rows, L) sums of P V, one per split
  float* partial_stats;     // (partials, rows, 2) base (log2) and sum of P per split
  int4* splits;             // (B,) SplitList, written here, read by mla_decode_combine
  int64_t out_stride_b, out_stride_t, out_stride_h;  // in elements, like all strides
  int64_t table_stride;
  int64_t max_keys;                   // NB * block_size
  int batch, num_queries, num_heads;  // B, Q, H
  int block_shift, num_blocks;        // log2(block_size), P
  int page_groups;                    // groups of 8 tokens from one page to the next
  int num_splits;                     // splits per sequence; 0: shares of all key tiles
  int split_cost;                     // cost of splitting a sequence, in key tiles
  float score_factor;                 // scale * log2(e)
};

// The problem that the scheduler divides. A CTA group has a CTA per row tile.
__device__ __forceinline__ DecodeProblem problem_of(const MlaDecodeSm90Params& p) {
  return DecodeProblem{p.context_lens, p.max_keys,   p.batch, p.num_queries, p.num_heads, 0,
                       p.num_splits,   p.split_cost, 1,       true};
}

// ---- tiles -------------------------------------------------------------------------------------

constexpr int kStages = STAGES;
constexpr int kRows = 64, kKeys = 64;     // rows of Q and keys of a tile
constexpr int kBoxKeys = BOX_KEYS;        // keys per TMA box: the page size, at most kKeys
constexpr int kBoxes = kKeys / kBoxKeys;  // boxes per tile and part
constexpr int kChunks = kWidth / 64;      // chunks of 64 values, 128 bytes
constexpr int kColumns = kLatent / 2;     // columns of O per consumer warpgroup
static_assert(kLatent % 128 == 0 && kRope == 64, "whole chunks for each warpgroup");

// A tile is loaded, waited for and released in parts: the latents of each warpgroup's columns of O
// (parts 0 and 1), and the rotated keys.
constexpr int kParts = 3, kRopePart = 2;
constexpr int kHalfChunks = kColumns / 64;  // chunks of parts 0 and 1
__device__ __forceinline__ constexpr int chunks_of(int part) {
  return part == kRopePart ? 1 : kHalfChunks;
}

// ---- warps -------------------------------------------------------------------------------------

// Two consumer warpgroups, then the producers' warps: one loads keys, one queries, and two release
// their registers.
constexpr int kGroupThreads = 128;  // threads of a warpgroup
constexpr int kConsumerThreads = 2 * kGroupThreads, kThreads = kConsumerThreads + kGroupThreads;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * 168, "see attention_decode");

// ---- shared memory: byte offsets ---------------------------------------------------------------
//
//   Q | stages | P and statistics, and sums, that the warpgroups exchange | mbarriers | work tiles
//
// Q: kChunks blocks of kRows rows of 128 bytes, swizzled. A stage: 3 parts of 8 groups of 8 keys; a
// group consists of the part's chunks, each 8 rows of 128 bytes, swizzled by TMA.
constexpr int kChunkBytes = kRows * 128, kQBytes = kChunks * kChunkBytes;
constexpr int kTileBytes = kChunks * kKeys * 128;
constexpr int kStagesAt = kQBytes;
constexpr int kExchangeAt = kStagesAt + kStages * kTileBytes;
constexpr int kExchangeBytes =
    kGroupThreads * (kKeys / 2 * 2 + 16);  // P; base and factor of 2 rows
constexpr int kSumsAt = kExchangeAt + kExchangeBytes, kSumsBytes = 2 * kRows * 4;
constexpr int kBarriersAt = kSumsAt + kSumsBytes;
constexpr int kHandoffsAt = kBarriersAt + 2 * kStages * kParts * 8;  // 4 warps of 2 warpgroups
constexpr int kSumsReadyAt = kHandoffsAt + 8 * 8;                    // the same
constexpr int kQFullAt = kSumsReadyAt + 8 * 8, kQEmptyAt = kQFullAt + 8;
constexpr int kWorkAt = kQEmptyAt + 8, kWorkBytes = 40;
constexpr int kSharedBytes = kWorkAt + 2 * kWorkBytes;
static_assert(sizeof(WorkTile) <= kWorkBytes, "two work tiles");
static_assert(kSharedBytes == SHARED_BYTES, "HopperTile.shared_bytes computes another size");
static_assert(kSharedBytes <= 227 * 1024, "more than an SM has");

// The stages, by the number of a tile since the CTA's start.
struct Ring {
  unsigned smem;

  // One thread calls it; a block barrier must follow.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages * kParts; ++i) {
      mbarrier_init(smem + kBarriersAt + i * 8, 1);
      mbarrier_init(smem + kBarriersAt + (kStages * kParts + i) * 8, kGroupThreads);
    }
    for (int i = 0; i < 16; ++i) mbarrier_init(smem + kHandoffsAt + i * 8, kWarpSize);
    mbarrier_init(smem + kQFullAt, 1);
    mbarrier_init(smem + kQEmptyAt, kConsumerThreads);
    mbarrier_init_fence();
  }
  __device__ __forceinline__ unsigned part(unsigned i, int part) const {
    return smem + kStagesAt + i % kStages * kTileBytes + part * kHalfChunks * kKeys * 128;
  }
  __device__ __forceinline__ unsigned full(unsigned i, int part) const {
    return smem + kBarriersAt + (i % kStages * kParts + part) * 8;
  }
  __device__ __forceinline__ unsigned empty(unsigned i, int part) const {
    return full(i, part) + kStages * kParts * 8;
  }
  __device__ __forceinline__ void wait_full(unsigned i, int part) const {
    mbarrier_wait(full(i, part), i / kStages & 1);
  }
  __device__ __forceinline__ void wait_empty(unsigned i, int part) const {
    mbarrier_wait(empty(i, part), i / kStages & 1 ^ 1);
  }
  // A warpgroup has finished with the part. Its last readers are the warps that arrive: warpgroup g
  // for part g, because P of a tile exists only once its scores are complete; for the rotated keys,
  // the tile's owner. Every lane arrives: racecheck follows only threads that arrive themselves.
  __device__ __forceinline__ void release(unsigned i, int part) const {
    mbarrier_arrive(empty(i, part));
  }
};
