// Tile sizes and shared memory of attention_prefill_fp8_sm90.
//
// Shared memory holds rings for work tiles with their Q, for K, for V as loaded (raw), and for V
// transposed. Each stage has a full and an empty mbarrier.
#pragma once

#include "attention_prefill/attention_prefill_fp8_wgmma.cuh"
#include "attention_prefill/attention_prefill_scheduler_sm90.cuh"

// Module configuration: Fp8Tile in kernels/attention_prefill_fp8/sm90.py.
constexpr int kHeadDim = HEAD_DIM;  // head dimension, padded
constexpr int kConsumerWarpgroups = CONSUMERS;
constexpr int kStages = STAGES;
constexpr int kSpan = SPAN;  // number of keys that a consumer processes at a time
constexpr bool kTurns = TURNS != 0;
constexpr unsigned kLineKeys = LINE_KEYS;
constexpr int kSumTiles = SUM_TILES;  // key tiles accumulated on the tensor cores; 0: all

constexpr int kKeys = 128, kQStages = 2, kTransposers = 2;
constexpr int kSpans = kKeys / kSpan;
constexpr int kRows = 64 * kConsumerWarpgroups;
constexpr int kThreads = 128 * (kConsumerWarpgroups + 1);
constexpr int kColumns = kHeadDim + 8;  // columns of operand B of P V: V, then ones
constexpr int kQBytes = kRows * kHeadDim, kKeyBytes = kKeys * kHeadDim;
constexpr int kValueBytes = kColumns * kKeys;
constexpr int kSumBytes = kSumTiles ? 128 * kConsumerWarpgroups * kColumns / 2 * 4 : 0;
constexpr int kProducerRegisters = kConsumerWarpgroups == 2 ? 56 : 32;
constexpr int kConsumerRegisters = kConsumerWarpgroups == 2   ? 224
                                   : kConsumerWarpgroups == 3 ? 160
                                                              : 112;

// Shared-memory addresses; for a ring, the address of stage 0.
struct SharedMemory {
  unsigned q, v, k, raw, sums;
  unsigned q_full, q_empty, k_full, k_empty, v_full, v_empty, raw_full, raw_empty;
  WorkTile* work;  // one per stage of Q

  static constexpr int kBarriers = 2 * kQStages + 6 * kStages;
  static constexpr int kBytes = 1024 + kQStages * kQBytes +
                                kStages * (2 * kKeyBytes + kValueBytes) + kSumBytes +
                                kQStages * static_cast<int>(sizeof(WorkTile)) + 8 * kBarriers;

  __device__ __forceinline__ explicit SharedMemory(unsigned char* smem) {
    v = (smem_address(smem) + 1023) & ~1023u;
    q = v + kStages * kValueBytes;
    k = q + kQStages * kQBytes;
    raw = k + kStages * kKeyBytes;
    sums = raw + kStages * kKeyBytes;
    const unsigned works = sums + kSumBytes;
    work = reinterpret_cast<WorkTile*>(smem + (works - smem_address(smem)));
    q_full = works + kQStages * sizeof(WorkTile);
    q_empty = q_full + 8 * kQStages;
    k_full = q_empty + 8 * kQStages;
    k_empty = k_full + 8 * kStages;
    v_full = k_empty + 8 * kStages;
    v_empty = v_full + 8 * kStages;
    raw_full = v_empty + 8 * kStages;
    raw_empty = raw_full + 8 * kStages;
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < kQStages; ++i) {
      mbarrier_init(q_full + 8 * i, 1);
      // One arrival per thread that reads work[i].
      mbarrier_init(q_empty + 8 * i, 128 * kConsumerWarpgroups + 32 * kTransposers);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(k_full + 8 * i, 1);
      mbarrier_init(k_empty + 8 * i, 4 * kConsumerWarpgroups);
      mbarrier_init(v_full + 8 * i, 32 * kTransposers);
      mbarrier_init(v_empty + 8 * i, 4 * kConsumerWarpgroups);
      mbarrier_init(raw_full + 8 * i, 1);
      mbarrier_init(raw_empty + 8 * i, 32 * kTransposers);
    }
    mbarrier_init_fence();
  }

  // Writes the columns of ones after V. Each of the eight sums an eighth of the keys, since a small
  // P loses fewer bits when added to a smaller sum. Also zeroes Q if some rows of a tile never hold
  // a query (kRows is not a multiple of the group): NaN there would needlessly give these rows a
  // new base with every key tile.
  __device__ __forceinline__ void init_tiles(const Problem& problem) const {
    constexpr unsigned kOne = 0x38;  // 1 in e4m3
    const auto fill = [](unsigned to, unsigned even, unsigned odd) {
      st_shared_v4(to, even, odd, even, odd);
    };
    for (int stage = 0; stage < kStages; ++stage)
      if (threadIdx.x < 64)
        fill(v + stage * kValueBytes + kHeadDim * kKeys + threadIdx.x * 16,
             threadIdx.x / 8 < 4 ? kOne << threadIdx.x / 8 * 8 : 0u,
             threadIdx.x / 8 < 4 ? 0u : kOne << (threadIdx.x / 8 - 4) * 8);
    if (problem.group * problem.tile_tokens != kRows)
      for (int i = threadIdx.x * 16; i < kQStages * kQBytes; i += kThreads * 16)
        fill(q + i, 0u, 0u);
    fence_async_proxy();
  }
};
