// Tile sizes and shared memory of attention_prefill_few_tokens_sm90: rings for key tiles, for the
// CTA's columns of V, for the tiles' maxima and for P.
#pragma once

#include "attention_prefill/attention_prefill_keys_sm90.cuh"
#include "attention_prefill/attention_prefill_softmax_sm90.cuh"

// Module configuration: FewTokensTile in kernels/attention_prefill/few_tokens.py.
constexpr int kHeadDim = HEAD_DIM;    // columns of Q and K, padded
constexpr int kValueDim = VALUE_DIM;  // columns of V, padded
constexpr int kKeys = TILE_KEYS;
#ifdef NEW_TOKEN
constexpr bool kNewToken = NEW_TOKEN;  // norm, rotation and store of the newest tokens are fused
#else
constexpr bool kNewToken = false;
#endif

constexpr int kRows = 16;
constexpr int kLoaders = 2;  // warps that load K; as many load V
constexpr int kScoreWarps = kKeys <= 80 && kValueDim <= 128 ? 8 : 4;
constexpr int kColumns = 32;  // columns of O per value warp
constexpr int kMaxThreads = 32 * (2 * kLoaders + kScoreWarps + kValueDim / kColumns);
static_assert(kValueDim % kColumns == 0 && kMaxThreads <= 512, "128 registers");

constexpr int kChunks = (kHeadDim + 63) / 64;  // chunks of 64 columns (128 bytes)
constexpr int kQChunk = kRows * 128, kQBytes = kChunks * kQChunk;
constexpr int kKeyChunk = kKeys * 128, kKeyBytes = kChunks * kKeyChunk;
constexpr int kMaxStages = kScoreWarps;  // stages of K, and as many of V

// P of a key tile as operands A, then each lane's sums and factors, then the rows' bases.
constexpr int kProbStages = 8;
constexpr int kProbSums = kKeys / 16 * 512, kProbBases = kProbSums + 512;
constexpr int kProbBytes = kProbBases + 64;

// SAFETY: a warp that publishes the maxima of tile t has stored P of tile t - kScoreWarps, so P of
// all tiles up to t - kScoreWarps - kProbStages has been used. The slowest warp's next tile is
// therefore a later one, and it has read the maxima of all tiles up to kScoreWarps before that. So
// the ring of maxima needs no mbarriers for empty places.
constexpr int kTopStages = 32, kTopBytes = 64;
static_assert(2 * kScoreWarps + kProbStages <= kTopStages);

// Score warps skip tiles, so they may not wait for the phases of a stage: one that has not begun
// could have the same parity as the one before. So k_full has an mbarrier for each warp, and
// prob_used is a ring of more places than tiles are in flight.

// Tile t's place in the rings of the maxima and of prob_used, and its parity there.
struct TilePlace {
  int index;
  unsigned parity;

  __device__ __forceinline__ explicit TilePlace(int t)
      : index(t % kTopStages), parity(t / kTopStages % 2) {}
};

// A stage of a ring whose length is known at run time, and the parity to wait for.
struct Ring {
  int stage = 0;
  unsigned phase;

  __device__ __forceinline__ explicit Ring(unsigned phase) : phase(phase) {}
  // steps <= stages
  __device__ __forceinline__ void advance(int stages, int steps) {
    stage += steps;
    if (stage < stages) return;
    stage -= stages;
    phase ^= 1;
  }
};

// Shared-memory addresses; for a ring, the address of stage 0.
struct FewTokensMemory {
  unsigned q, k, v, probs, tops;
  unsigned q_full, top_full, prob_used, prob_full, k_full, k_empty, v_full, v_empty;

  static constexpr int kBarriers = 1 + 2 * kTopStages + kProbStages + kScoreWarps + 3 * kMaxStages;
  // Besides the stages of K and V.
  static constexpr int kFixedBytes =
      1024 + kQBytes + kProbStages * kProbBytes + kTopStages * kTopBytes + 8 * kBarriers;

  // `value_bytes`: of a stage of V.
  __device__ __forceinline__ FewTokensMemory(unsigned char* smem, int stages, int value_bytes) {
    q = (smem_address(smem) + 1023) & ~1023u;
    k = q + kQBytes;
    v = k + stages * kKeyBytes;
    probs = v + stages * value_bytes;
    tops = probs + kProbStages * kProbBytes;
    q_full = tops + kTopStages * kTopBytes;
    top_full = q_full + 8;
    prob_used = top_full + 8 * kTopStages;
    prob_full = prob_used + 8 * kTopStages;
    k_full = prob_full + 8 * kProbStages;
    k_empty = k_full + 8 * kScoreWarps;
    v_full = k_empty + 8 * kMaxStages;
    v_empty = v_full + 8 * kMaxStages;
  }

  // All threads call it; a barrier must follow. Four warps initialise some mbarriers each, since
  // the lanes of a warp take turns.
  __device__ __forceinline__ void init(int value_warps) const {
    const int warp_idx = threadIdx.x / 32, i = threadIdx.x % 32;
    if (warp_idx == 0) mbarrier_init(top_full + 8 * i, 32);
    if (warp_idx == 1) mbarrier_init(prob_used + 8 * i, 32 * value_warps);
    if (warp_idx == 2) {
      if (i == 0) mbarrier_init(q_full, kNewToken ? 32 * value_warps : 1);
      if (i < kProbStages) mbarrier_init(prob_full + 8 * i, 32);
      if (i < kScoreWarps) mbarrier_init(k_full + 8 * i, 1);
      if (i < kMaxStages) mbarrier_init(k_empty + 8 * i, 32);
    }
    if (warp_idx == 3 && i < kMaxStages) {
      mbarrier_init(v_full + 8 * i, 1);
      mbarrier_init(v_empty + 8 * i, 32 * value_warps);
    }
    mbarrier_init_fence();
  }

  // Zeroes Q if some rows never hold a query: kRows is not a multiple of the group, or there is one
  // token.
  __device__ __forceinline__ void init_queries(const Problem& problem) const {
    if (!kNewToken && problem.group * problem.tile_tokens == kRows) return;
    for (int i = threadIdx.x * 16; i < kQBytes; i += blockDim.x * 16)
      st_shared_v4(q + i, 0u, 0u, 0u, 0u);
    fence_async_proxy();
  }
};
static_assert(kTopStages == 32, "one lane each");
