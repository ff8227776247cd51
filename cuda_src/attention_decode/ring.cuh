// Sizes of attention_decode_sm90, and the ring of K and V tiles between its warps.
//
// Macros: HEAD_DIM; UNIT_KEYS, tokens of one copy; STAGES, tiles of K and of V in the ring;
// ROW_TILES, of 16 rows each; KEY_WARPS, warps that divide a tile; CLUSTER, blocks that share one
// sequence and head, or 1 for plan.cuh's teams; FRESH, whether the newest token comes as
// new_token.cuh takes it; BLOCKS_PER_SM, which share a multiprocessor.
#pragma once

#include "common/attention_sm90.cuh"
#include "attention_decode/plan.cuh"
#include "common/mma.cuh"

constexpr int kHeadDim = HEAD_DIM, kUnitKeys = UNIT_KEYS, kStages = STAGES;
constexpr int kRowTiles = ROW_TILES, kKeyWarps = KEY_WARPS, kCluster = CLUSTER;
constexpr bool kFresh = FRESH;
constexpr int kBlocksPerSm = BLOCKS_PER_SM;
// Nine warps of a block, or ten of two blocks, have 168 registers each. Where that is too few, the
// copying warp is in a warpgroup of its own, which gives registers to the others, and keeps more of
// them if its other warps make rows (kMakesAhead).
constexpr bool kMovesRegisters = (kKeyWarps == 8 || kFresh) && kCluster == 1;
constexpr int kThreads = (kKeyWarps + (kMovesRegisters ? 4 : 1)) * kWarpSize;
constexpr int kRows = kRowTiles * 16;
constexpr int kCombineLoads = kRowTiles == 4 ? 4 : 16;  // at once, as far as registers go

constexpr int kRowBytes = kHeadDim * 2;
constexpr bool kSwizzled = kCluster == 1;  // how tiles lie in shared memory, see tile_offset
constexpr int kUnitBytes = kUnitKeys * kRowBytes;
constexpr int kUnitPitch = kUnitBytes + (kSwizzled ? 0 : 16);
constexpr int kTileKeys = 8 * kUnitKeys;
constexpr int kTileBytes = 8 * kUnitPitch;
constexpr int kProbPitch = kTileKeys * 2 + 16;  // bytes; 16 more, so that ldmatrix has no conflicts
static_assert(kHeadDim % 64 == 0 && kUnitKeys % 8 == 0, "see tile_offset");

// Shared memory: tiles of K, of V, two buffers of P, two of maxima, sums, barriers, Q, one flag, the
// warps' progress, the newest tokens' keys and values, what a cluster's blocks send each other.
constexpr int kProbsAt = 2 * kStages * kTileBytes;
constexpr int kProbBytes = kRows * kProbPitch;
constexpr int kMaximaAt = kProbsAt + 2 * kProbBytes;
constexpr int kExchangeBytes = kRows * kKeyWarps * 4;
constexpr int kSumsAt = kMaximaAt + 2 * kExchangeBytes;
constexpr int kBarriersAt = kSumsAt + kExchangeBytes;
constexpr bool kQueriesInRegisters = kRowTiles * kHeadDim <= 256;  // else read from there
// Where a block has many sequences, three warps beside the copying one make the newest tokens' rows
// while others are attended to; else the computing warps do it themselves, which is sooner.
constexpr bool kMakesAhead = kFresh && kBlocksPerSm > 1 && kCluster == 1;
constexpr int kMakers = 3 * kWarpSize;
static_assert(!kFresh || kMakesAhead || kQueriesInRegisters, "make_fresh has one buffer of Q");
constexpr int kQueryBuffers = kQueriesInRegisters && !kMakesAhead ? 1 : 2;
constexpr int kQueriesAt = kBarriersAt + (4 * kStages + 2 * kQueryBuffers) * 8;
constexpr int kQueryPitch = kRowBytes + 16;
constexpr int kQueryBytes = kRows * kQueryPitch;
constexpr int kFlagAt = kQueriesAt + kQueryBuffers * kQueryBytes;
constexpr int kProgressAt = kFlagAt + 16;
constexpr int kFreshAt = kProgressAt + (kKeyWarps + (kMakesAhead ? kMakers / kWarpSize : 0)) * 64;
constexpr int kFreshBytes = 2 * kRowBytes + 16;  // key, value, and where the key belongs
constexpr int kInboxAt = kFreshAt + (kFresh ? kQueryBuffers * kFreshBytes : 0);
constexpr bool kSends = kCluster > 1 && kRowTiles == 1;  // there is room for it
constexpr int kInboxBytes = kSends ? kRows * (kHeadDim * 4 + kCluster * 8) + 16 : 0;
constexpr int kInboxBarrierAt = kInboxAt + kInboxBytes - 16;
constexpr int kSharedBytes = kInboxAt + kInboxBytes;
static_assert(kSharedBytes == SHARED_BYTES,
              "kernels/attention_decode/sm90.py computes another size");
static_assert(kSharedBytes <= (kBlocksPerSm == 2 ? 113 : 227) * 1024, "they do not fit");

// Registers of a thread, where warpgroups divide them anew. Two blocks have 8 warps of 128 each.
constexpr int kKeyRegisters = kKeyWarps == 8 ? 232 : kMakesAhead ? 160 : 208;
constexpr int kOtherRegisters = kMakesAhead ? 96 : 40;
// SAFETY: a warpgroup that takes more than the launch has left waits for ever.
static_assert(!kMakesAhead || (kKeyWarps == 4 && kKeyRegisters + kOtherRegisters <= 2 * 128),
              "more registers than two blocks have");
static_assert(kKeyWarps != 8 || 2 * kKeyRegisters + kOtherRegisters <= 3 * 168, "nor a block");

// Where 16-byte word `word` of a tile's key number `index` lies, so that ldmatrix finds that word of
// 8 following keys in 8 different banks. Swizzled by TMA: a unit is its rows' first 128 bytes, then
// their second 128 (D = 128), and in each a word's number is xored with the row's. Else a unit is as
// in memory, but units are 16 bytes more than a multiple of 128 apart, and 8 following numbers are
// the same row of the 8 units. That is 5 % slower where memory is the limit, but needs no map to be
// fetched first: for clusters, whose launches are short.
__device__ __forceinline__ unsigned tile_offset(int index, int word) {
  if constexpr (!kSwizzled) return index % 8 * kUnitPitch + index / 8 * kRowBytes + word * 16;
  const int row = index % kUnitKeys;
  return index / kUnitKeys * kUnitBytes + word / 8 * (kUnitKeys * 128) + row * 128 +
         (word ^ row) % 8 * 16;
}
// Its place among the tile's keys, and the number of the key at a place.
__device__ __forceinline__ int key_of(int index) {
  return kSwizzled ? index : index % 8 * kUnitKeys + index / 8;
}
__device__ __forceinline__ int index_of(int place) {
  return kSwizzled ? place : place % kUnitKeys * 8 + place / kUnitKeys;
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

#if CLUSTER > 1
using Cursor = ClusterCursor<kTileKeys, kCluster>;
#define ENGINE_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
using Cursor = DecodeCursor<kTileKeys>;
#define ENGINE_CLUSTER
#endif

// A computing or making warp's place in its work. In shared memory: its registers are for the inner loop.
struct Progress {
  Cursor cursor;
  Segment segment;

  __device__ __forceinline__ bool next(const DecodeProblem& problem) {
    __syncwarp();  // SAFETY: all lanes read the cursor before one of them writes it.
    Cursor moved = cursor;
    Segment found;
    const bool any = moved.next(problem, found);
    __syncwarp();
    cursor = moved;
    if (any) segment = found;
    __syncwarp();
    return any;
  }
};
static_assert(sizeof(Progress) <= 64, "see kProgressAt");

// Of this warp; the copying one, between the computing and the making ones, has none.
__device__ __forceinline__ Progress& progress_of(unsigned char* smem) {
  const int warp = threadIdx.x / kWarpSize;
  return reinterpret_cast<Progress*>(smem + kProgressAt)[warp - (warp > kKeyWarps)];
}

// Where one side of the ring is. Everything is an address in shared memory.
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(unsigned smem) : smem_(smem) {}

  // By one thread, before a block barrier.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int kind = 0; kind < 2; ++kind) mbarrier_init(barrier(kind, stage), 1);
      // SAFETY: every lane that has read arrives. One for its warp after __syncwarp would do, and
      // takes as long, but compute-sanitizer then takes the other lanes' reads for races.
      for (int kind = 2; kind < 4; ++kind)
        mbarrier_init(barrier(kind, stage), kKeyWarps * kWarpSize);
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

// The buffers of Q, and of what comes with it, likewise: one a segment.
class QueryRing {
 public:
  __device__ __forceinline__ explicit QueryRing(unsigned smem) : smem_(smem) {}

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kQueryBuffers; ++i) {
      mbarrier_init(barrier(0, i), kMakesAhead ? kMakers : 1);
      mbarrier_init(barrier(1, i), kKeyWarps * kWarpSize);
    }
  }

  __device__ __forceinline__ int q_at() const { return kQueriesAt + buffer_ * kQueryBytes; }
  __device__ __forceinline__ int fresh_at() const { return kFreshAt + buffer_ * kFreshBytes; }
  __device__ __forceinline__ unsigned q() const { return smem_ + q_at(); }
  __device__ __forceinline__ unsigned full() const { return barrier(0, buffer_); }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), phase_); }
  __device__ __forceinline__ void wait_empty() const {
    if constexpr (kMakesAhead)
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
