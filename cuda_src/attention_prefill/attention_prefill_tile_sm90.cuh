// Tile sizes and shared memory of attention_prefill_sm90.
//
// Shared memory holds three rings: for work tiles with their Q, for K and for V. Each stage has a
// full and an empty mbarrier.
#pragma once

#include "attention_prefill/attention_prefill_keys_sm90.cuh"

#ifndef FEW_ROWS
#define FEW_ROWS 0
#endif

// Module configuration: HopperTile in kernels/attention_prefill/sm90.py.
constexpr int kHeadDim = HEAD_DIM;    // columns of Q and K, padded
constexpr int kValueDim = VALUE_DIM;  // columns of V, padded
constexpr int kConsumerWarpgroups = CONSUMERS;
constexpr int kKeys = TILE_KEYS;
constexpr int kStages = STAGES, kQStages = Q_STAGES;
constexpr bool kPattern = PATTERN != 0;

constexpr bool kFewRows = FEW_ROWS != 0;
constexpr int kRows = kFewRows ? 16 : 64 * kConsumerWarpgroups;
constexpr int kMinBlocks = kFewRows ? 2 : 1;  // CTAs per SM for which registers suffice
constexpr int kReleases = kFewRows ? 128 : 4 * kConsumerWarpgroups;  // arrivals that free a stage
constexpr int kThreads = 128 * (kConsumerWarpgroups + 1);
constexpr int kChunks = (kHeadDim + 63) / 64;  // chunks of 64 columns (128 bytes)
constexpr int kQChunk = kRows * 128, kQBytes = kChunks * kQChunk;
constexpr int kKeyChunk = kKeys * 128, kKeyBytes = kChunks * kKeyChunk;
constexpr int kValueChunks = (kValueDim + 63) / 64, kValueBytes = kValueChunks * kKeyChunk;
constexpr int kBoxes = kKeys / 16;  // maximum boxes per key tile: a page has at least 16 keys
// Stages of codes for quantized pages (attention_prefill_code_producer_sm90.cuh): each holds one
// tile of K or V.
constexpr int kCodeStages = kHasCodes ? 4 : 0, kCodeBytes = kKeys * kHeadDim;
constexpr int kConvertingThreads = 2 * 32;
static_assert(!kHasCodes || (!kPattern && (kHeadDim == 64 || kHeadDim == 128)),
              "rows are swizzled");
static_assert(!kHasCodes || kValueDim == kHeadDim, "pages of keys and values are alike");
constexpr int kProducerRegisters = kHasCodes                  ? 56
                                   : kConsumerWarpgroups == 3 ? 32
                                   : kPattern                 ? 56
                                                              : 40;
constexpr int kConsumerRegisters =
    (65536 / 128 / kMinBlocks - kProducerRegisters) / kConsumerWarpgroups / 8 * 8;
static_assert(!kPattern || kKeys <= 128, "a thread's keys have one bit each of a register");

// Issuing a copy occupies a warp, so three warps share the copies if there are many per key tile.
// With a pattern the loading warp has no registers left for that.
__device__ __forceinline__ bool has_helpers(const Problem& problem) {
  return !kPattern && !kHasCodes && 4 * problem.box_keys <= kKeys;
}

// Shared-memory addresses; for a ring, the address of stage 0.
struct SharedMemory {
  unsigned q, k, v;
  unsigned work_full, q_full, q_empty, k_full, k_empty, v_full, v_empty;
  unsigned v_tail;      // mbarrier: V of a partial tile has arrived, with its tail not yet zeroed
  unsigned boxes_full;  // mbarrier: `boxes` of a stage have been written
  WorkTile* work;       // one per stage of Q
  int* key_tile;        // per stage, with a pattern: key tile index | the flags below
  static constexpr int kMore = 1 << 30, kMasked = 1 << 29;
  int* boxes;  // per stage: start rows of its boxes, for the helper warps
  static constexpr int kOnlyK = static_cast<int>(1u << 31), kStop = -1;
  unsigned codes, codes_full, codes_empty;
  int* valid_rows;  // per stage of codes: number of rows that hold keys; negative: the end

  static constexpr int kBarriers = 3 * kQStages + 5 * kStages + 1;
  static constexpr int kBytes = 1024 + kQStages * kQBytes + kStages * (kKeyBytes + kValueBytes) +
                                kQStages * static_cast<int>(sizeof(WorkTile)) + 8 * kBarriers +
                                4 * kStages * (1 + kBoxes) + kCodeStages * (kCodeBytes + 2 * 8 + 4);

  __device__ __forceinline__ explicit SharedMemory(unsigned char* smem) {
    q = (smem_address(smem) + 1023) & ~1023u;
    k = q + kQStages * kQBytes;
    v = k + kStages * kKeyBytes;
    codes = v + kStages * kValueBytes;
    const unsigned works = codes + kCodeStages * kCodeBytes;
    work = reinterpret_cast<WorkTile*>(smem + (works - smem_address(smem)));
    work_full = works + kQStages * sizeof(WorkTile);
    q_full = work_full + 8 * kQStages;
    q_empty = q_full + 8 * kQStages;
    k_full = q_empty + 8 * kQStages;
    k_empty = k_full + 8 * kStages;
    v_full = k_empty + 8 * kStages;
    v_empty = v_full + 8 * kStages;
    v_tail = v_empty + 8 * kStages;
    boxes_full = v_tail + 8;
    key_tile = reinterpret_cast<int*>(smem + (boxes_full + 8 * kStages - smem_address(smem)));
    if constexpr (kHasCodes) {  // quantized pages have neither patterns nor helper warps
      codes_full = boxes_full + 8 * kStages;
      codes_empty = codes_full + 8 * kCodeStages;
      valid_rows =
          reinterpret_cast<int*>(smem + (codes_empty + 8 * kCodeStages - smem_address(smem)));
      return;
    }
    boxes = key_tile + kStages;
  }

  __device__ __forceinline__ void init_barriers(const Problem& problem) const {
    // SAFETY: a helper warp arrives on k_empty once it has read the start rows of the stage's
    // boxes.
    const int helpers = has_helpers(problem) ? 2 * 32 : 0;
    for (int i = 0; i < kQStages; ++i) {
      mbarrier_init(work_full + 8 * i, 1);
      mbarrier_init(q_full + 8 * i, 1);
      // One arrival per thread that reads work[i].
      mbarrier_init(q_empty + 8 * i, 128 * kConsumerWarpgroups + 32);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(k_full + 8 * i, kHasCodes ? kConvertingThreads : 1);
      // With few rows every lane of the warp that zeroes the end of V arrives; one would suffice,
      // but compute-sanitizer then reports races.
      mbarrier_init(v_full + 8 * i, kHasCodes ? kConvertingThreads : kFewRows ? 32 : 1);
      mbarrier_init(k_empty + 8 * i, kReleases + helpers);
      mbarrier_init(v_empty + 8 * i, kReleases);
      mbarrier_init(boxes_full + 8 * i, kBoxes);  // one arrival per lane that writes a box
    }
    for (int i = 0; i < kCodeStages; ++i) {
      mbarrier_init(codes_full + 8 * i, 1);
      mbarrier_init(codes_empty + 8 * i, kConvertingThreads);
    }
    mbarrier_init(v_tail, 1);
    mbarrier_init_fence();
  }

  // Zeroes Q if some rows of a tile never hold a query (kRows is not a multiple of the group): NaN
  // there would needlessly rescale these rows' sums with every key tile.
  __device__ __forceinline__ void init_queries(const Problem& problem) const {
    if (problem.group * problem.tile_tokens == kRows) return;
    for (int i = threadIdx.x * 16; i < kQStages * kQBytes; i += kThreads * 16)
      st_shared_v4(q + i, 0u, 0u, 0u, 0u);
    fence_async_proxy();
  }
};
