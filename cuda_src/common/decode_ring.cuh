// Sizes of attention_decode_sm90, and the ring of K and V tiles between its warps.
//
// Macros: HEAD_DIM; UNIT_KEYS, tokens of one bulk copy; STAGES, tiles of K and of V in the ring;
// ROW_TILES, of 16 rows each; KEY_WARPS, warps that divide a tile; CLUSTER, blocks that share one
// sequence and head, or 1 for decode_plan.cuh's teams.
#pragma once

#include "common/decode_plan.cuh"
#include "common/mma.cuh"
#include "common/sm90.cuh"

constexpr int kHeadDim = HEAD_DIM, kUnitKeys = UNIT_KEYS, kStages = STAGES;
constexpr int kRowTiles = ROW_TILES, kKeyWarps = KEY_WARPS, kCluster = CLUSTER;
constexpr int kThreads = (kKeyWarps + 1) * kWarpSize;
constexpr int kRows = kRowTiles * 16;
constexpr int kCombineLoads = kRowTiles == 4 ? 4 : 16;  // at once, as far as registers go

constexpr int kRowBytes = kHeadDim * 2;
constexpr int kUnitPitch = kUnitKeys * kRowBytes + 16;  // see attention_decode_sm90.cu
constexpr int kTileKeys = 8 * kUnitKeys;
constexpr int kTileBytes = 8 * kUnitPitch;
constexpr int kProbPitch = kTileKeys * 2 + 16;  // bytes; 16 more, so that ldmatrix has no conflicts
static_assert(kUnitKeys * kRowBytes % 128 == 0 && kUnitKeys % 8 == 0, "see kUnitPitch");

// Shared memory: tiles of K, of V, two buffers of P, two of maxima, sums, barriers, perhaps Q, one
// flag, the warps' progress.
constexpr int kProbsAt = 2 * kStages * kTileBytes;
constexpr int kProbBytes = kRows * kProbPitch;
constexpr int kMaximaAt = kProbsAt + 2 * kProbBytes;
constexpr int kExchangeBytes = kRows * kKeyWarps * 4;
constexpr int kSumsAt = kMaximaAt + 2 * kExchangeBytes;
constexpr int kBarriersAt = kSumsAt + kExchangeBytes;
constexpr int kQueriesAt = kBarriersAt + 4 * kStages * 8;
constexpr int kQueryPitch = kRowBytes + 16;
constexpr bool kQueriesInRegisters = kRowTiles * kHeadDim <= 256;  // else in shared memory
constexpr int kFlagAt = kQueriesAt + (kQueriesInRegisters ? 0 : kRows * kQueryPitch);
constexpr int kProgressAt = kFlagAt + 16;
constexpr int kSharedBytes = kProgressAt + kKeyWarps * 64;
static_assert(kSharedBytes == SHARED_BYTES, "kernels/_decode_sm90.py computes another size");

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

// A computing warp's place in its work. In shared memory: its registers are for the inner loop.
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

// Where one side of the ring is. Everything is an address in shared memory.
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(unsigned smem) : smem_(smem) {}

  // By one thread, before a block barrier.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int kind = 0; kind < 2; ++kind) mbarrier_init(barrier(kind, stage), 1);
      for (int kind = 2; kind < 4; ++kind) mbarrier_init(barrier(kind, stage), kKeyWarps);
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
  __device__ __forceinline__ void wait_empty_k() const { mbarrier_wait(empty_k(), phase_ ^ 1); }
  __device__ __forceinline__ void wait_empty_v() const { mbarrier_wait(empty_v(), phase_ ^ 1); }

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
