// The sender of gemm_sm90.cu and w8_sm90.cuh: idle warps beside the producer send finished tiles of
// the result to the other ranks of a group, while the consumers multiply the next ones.
//
// A row counts as sent if every CTA has another tile after its tile of that row: the link carries
// those rows during products. The rows after them are left to the collective that follows
// (collectives/all_reduce.cu). For the buffers and their protocol see common/peer_memory.cuh.
#pragma once

#include "common/peer_memory.cuh"
#include "gemm/gemm_pipeline_sm90.cuh"
#include "gemm/gemm_scheduler_sm90.cuh"

constexpr int kNoOp = 0;            // sending never waits, so it cannot time out
constexpr int kSenderThreads = 96;  // the warps beside the producer
constexpr int kSenderVectors = 4;   // 16-byte vectors that a thread has in flight
constexpr int kConsumerWarps = kConsumerThreads / 32;
static_assert(!kSends || sizeof(scalar_t) == 2, "a vector holds eight values");

// What a launch sends.
struct Sending {
  PeerGroup* group;  // this rank's view of the group
  int rows;          // rows to send: whole tiles of the first rows; 0: none
  int segment;       // vectors sent to each rank: the whole result, or segment r to rank r
};

// A consumer warp has stored its part of a tile to send.
__device__ __forceinline__ void count_stored(unsigned stored) {
  if constexpr (kStores) {
    if (threadIdx.x % 32 == 0) bulk_wait();
  }
  __syncwarp();
  // SAFETY: releases the whole warp's stores, which precede it by the barrier.
  if (threadIdx.x % 32 == 0)
    asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"(stored) : "memory");
}

__device__ __forceinline__ unsigned load_stored(unsigned stored) {
  unsigned count;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(count) : "r"(stored) : "memory");
  return count;
}

// Sends this CTA's tiles of the first `sending.rows` rows; `thread` is below kSenderThreads.
// SAFETY: the count tells which tiles are stored only if no warp counts a tile before all have
// counted the previous one. A warp counts a tile after its last stage; if a tile has more stages
// than the ring, that stage was loaded after every warpgroup had released one of the same tile,
// and the wgmma that a release follows is one of all its four warps.
__device__ __forceinline__ void send(const Pipeline& p, const TileScheduler& s, const Words* out,
                                     const Sending& sending, int thread) {
  constexpr int kRowVectors = kTileN / kVec;
  constexpr int kRows = kSenderThreads / kRowVectors;  // rows per access of all threads
  static_assert(!kSends || kSenderThreads % kRowVectors == 0, "a thread has one column");
  PeerCall call(sending.group, kNoOp);
  pdl_wait();
  call.begin();
  const int length = s.n / kVec;
  const bool is_whole = sending.segment == s.m * length;
  const int first_row = thread / kRowVectors;
  unsigned awaited = 0;
  for (int index = s.first(); index < s.count(); index += s.step()) {
    const int2 tile = s.tile(index);
    if (tile.x >= sending.rows) return;  // so are all later ones
    awaited += kConsumerWarps;
    const int col = tile.y / kVec + thread % kRowVectors;
    if (col >= length) continue;                   // also for a cluster's tile past the last column
    int at = (tile.x + first_row) * length + col;  // vector index within the result
    while (load_stored(p.stored) < awaited) __nanosleep(100);
#pragma unroll 1
    for (int row = first_row; row < kTileM; row += kSenderVectors * kRows) {
      Words x[kSenderVectors];
#pragma unroll
      for (int i = 0; i < kSenderVectors; ++i) {
        if (row + i * kRows < kTileM) x[i] = load_peer_words(out + at + i * kRows * length);
      }
#pragma unroll 1
      for (int peer = 0; peer < call.size; ++peer) {
        if (peer == call.rank) continue;
        Words* to = call.target(peer, 0, sending.segment);
        const int first = is_whole ? 0 : peer * sending.segment;  // the peer's first vector
#pragma unroll
        for (int i = 0; i < kSenderVectors; ++i) {
          const int k = at + i * kRows * length - first;
          if (row + i * kRows < kTileM && 0 <= k && k < sending.segment)
            store_peer_words(to + k, sendable(x[i]));
        }
      }
      at += kSenderVectors * kRows * length;
    }
  }
}
