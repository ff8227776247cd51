// Pipelines between the producer and consumer warps of attention_decode_sm90: the shared-memory
// layout of a K or V tile, the ring of stages, and the Q buffers.
#pragma once

#include "attention_decode/attention_decode_config_sm90.cuh"

// ---- layout of a tile in shared memory ---------------------------------------------------------

// Byte offset of 16-byte word `word` of a tile's row `index`. ldmatrix reads the same word of 8
// consecutive rows together, so the layout puts these in different banks.
//
// Swizzled by TMA: a box holds the first 128 bytes of all its rows, then (D = 128) their second 128
// bytes. Within each part the word index is xored with the row index. Row i is key i of the tile.
//   words of row 0:  0 1 2 3 4 5 6 7
//            row 1:  1 0 3 2 5 4 7 6     word w of row i is at index w ^ i (mod 8)
//            row 2:  2 3 0 1 6 7 4 5
//            ...
// Rows of codes have half as many words: for D = 128 they are swizzled as above, for D = 64 the
// word index is xored with half the row index (mod 4).
//
// Unswizzled: a box is laid out as in global memory, the pitch of boxes is 16 bytes more than a
// multiple of 128, and 8 consecutive rows are the same row of the 8 boxes.
__device__ __forceinline__ unsigned tile_offset(int index, int word) {
  if constexpr (!kSwizzled) return index % 8 * kBoxPitch + index / 8 * kPageRowBytes + word * 16;
  if constexpr (kPageRowBytes == 64) return index * 64 + (word ^ index / 2) % 4 * 16;
  const int row = index % kBoxKeys;
  return index / kBoxKeys * kBoxBytes + word / 8 * (kBoxKeys * 128) + row * 128 +
         (word ^ row) % 8 * 16;
}
// Key, within the tile, that row `index` holds; and the inverse mapping.
__device__ __forceinline__ int key_of(int index) {
  return kSwizzled ? index : index % 8 * kBoxKeys + index / 8;
}
__device__ __forceinline__ int index_of(int key) {
  return kSwizzled ? key : key % kBoxKeys * 8 + key / kBoxKeys;
}

// ---- pipelines ---------------------------------------------------------------------------------

// The producer's or consumer's view of the ring of stages: its stage index and phase. A stage has a
// full and an empty mbarrier for each of K and V. Addresses are shared-memory addresses.
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(unsigned smem) : smem_(smem) {}

  // One thread calls it; a block barrier must follow.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barrier(kFullK, stage), 1);
      mbarrier_init(barrier(kFullV, stage), 1);
      // SAFETY: every consumer lane arrives. One arrival per warp after __syncwarp would suffice
      // and be no faster, but compute-sanitizer would report the other lanes' reads as races.
      mbarrier_init(barrier(kEmptyK, stage), kConsumerThreads);
      mbarrier_init(barrier(kEmptyV, stage), kConsumerThreads);
    }
    mbarrier_init_fence();
  }

  __device__ __forceinline__ unsigned k() const { return smem_ + state_.stage * kTileBytes; }
  __device__ __forceinline__ unsigned v() const { return k() + kStages * kTileBytes; }
  __device__ __forceinline__ unsigned full_k() const { return barrier(kFullK, state_.stage); }
  __device__ __forceinline__ unsigned full_v() const { return barrier(kFullV, state_.stage); }
  __device__ __forceinline__ unsigned empty_k() const { return barrier(kEmptyK, state_.stage); }
  __device__ __forceinline__ unsigned empty_v() const { return barrier(kEmptyV, state_.stage); }

  __device__ __forceinline__ void wait_full_k() const { mbarrier_wait(full_k(), state_.phase); }
  __device__ __forceinline__ void wait_full_v() const { mbarrier_wait(full_v(), state_.phase); }
  __device__ __forceinline__ void wait_empty_k() const {
    mbarrier_wait_to_overwrite(empty_k(), state_.phase ^ 1);
  }
  __device__ __forceinline__ void wait_empty_v() const {
    mbarrier_wait_to_overwrite(empty_v(), state_.phase ^ 1);
  }

  __device__ __forceinline__ void advance() { state_.advance(); }

 private:
  enum Kind { kFullK, kFullV, kEmptyK, kEmptyV };

  unsigned smem_;
  PipelineState<kStages> state_{0};

  __device__ __forceinline__ unsigned barrier(Kind kind, int stage) const {
    return smem_ + kBarriersAt + (kind * kStages + stage) * 8;
  }
};

// The producer's or consumer's view of the buffers of Q and of the new token's key and value. Each
// work tile uses one stage.
class QueryRing {
 public:
  __device__ __forceinline__ explicit QueryRing(unsigned smem) : smem_(smem) {}

  // One thread calls it, before Ring::init(), whose fence also covers these mbarriers.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kQueryBuffers; ++i) {
      mbarrier_init(barrier(kFull, i), kHasNewTokenWarps ? kNewTokenThreads : 1);
      mbarrier_init(barrier(kEmpty, i), kConsumerThreads);
    }
  }

  // Shared-memory offsets.
  __device__ __forceinline__ int q_at() const { return kQueriesAt + state_.stage * kQueryBytes; }
  __device__ __forceinline__ int new_kv_at() const { return kNewKvAt + state_.stage * kNewKvBytes; }

  __device__ __forceinline__ unsigned q() const { return smem_ + q_at(); }
  __device__ __forceinline__ unsigned full() const { return barrier(kFull, state_.stage); }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), state_.phase); }
  __device__ __forceinline__ void wait_empty() const {
    if constexpr (kHasNewTokenWarps)
      mbarrier_wait(barrier(kEmpty, state_.stage), state_.phase ^ 1);
    else
      mbarrier_wait_to_overwrite(barrier(kEmpty, state_.stage), state_.phase ^ 1);
  }
  __device__ __forceinline__ void release() {
    mbarrier_arrive(barrier(kEmpty, state_.stage));
    advance();
  }
  __device__ __forceinline__ void advance() { state_.advance(); }

 private:
  enum Kind { kFull, kEmpty };

  unsigned smem_;
  PipelineState<kQueryBuffers> state_{0};

  __device__ __forceinline__ unsigned barrier(Kind kind, int buffer) const {
    return smem_ + kBarriersAt + (4 * kStages + kind * kQueryBuffers + buffer) * 8;
  }
};
