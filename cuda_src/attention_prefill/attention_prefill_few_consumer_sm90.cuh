// The consumer warpgroup of attention_prefill_sm90 for work tiles of at most 16 rows, such as
// single tokens. Its results have the bits of attention_prefill_consumer_sm90.cuh.
//
// A row's sums have the same order: key tiles of the same size from the last to the first, the same
// softmax and epilogue, and tensor-core products over the same 16 columns or keys at a time. For
// these, mma.sync and wgmma return the same bits in both 16-bit dtypes.
//
// Each warp computes all of S, which costs less than exchanging P, and its own columns of O. With
// few columns some warps are idle. Tiles of 64 rows would be nearly empty, and waiting for memory
// would leave it idle, so two CTAs share a multiprocessor.
#pragma once

#include "attention_prefill/attention_prefill_softmax_sm90.cuh"
#include "attention_prefill/attention_prefill_tile_sm90.cuh"
#include "common/mma.cuh"

static_assert(kConsumerWarpgroups == 1 && !kPattern, "the only shape");

template <bool kSoftcap>
struct Consumer {
  static constexpr int kColumns = kValueDim <= 128 ? 32 : 64;  // columns of O per warp
  static_assert(kValueDim % kColumns == 0 && kValueDim <= 4 * kColumns);

  const SharedMemory& smem;
  const Problem& problem;
  ScoreRule rule;
  PipelineState<kQStages> q_ring;
  PipelineState<kStages> k_ring, v_ring;
#if PAGE_CODES           // named as in attention_prefill_consumer_sm90.cuh
  const float* k_scale;  // (K,)
  ScoreRule rule_of_keys;
#endif

  __device__ __forceinline__ Consumer(const SharedMemory& smem, const Problem& problem,
                                      const ScoreRule& rule)
      : smem(smem), problem(problem), rule(rule), q_ring(0), k_ring(0), v_ring(0) {}

  template <typename Epilogue>
  __device__ __forceinline__ void run(Epilogue epilogue) {
    const int lane_idx = threadIdx.x % 32;
    const int first_column = __shfl_sync(~0u, threadIdx.x / 32, 0) * kColumns;
    const bool is_idle = first_column >= kValueDim;
    epilogue.out += first_column;
    epilogue.value_dim -= first_column;
    if (first_column > 0) epilogue.lse = nullptr;
    for (;;) {
      mbarrier_wait(smem.q_full + 8 * q_ring.stage, q_ring.phase);
      const WorkTile tile = smem.work[q_ring.stage];
      if (tile.first_token < 0) return;
      unsigned q[kHeadDim / 16][4];
      load_queries(q, lane_idx);
      mbarrier_arrive(smem.q_empty + 8 * q_ring.stage);
      q_ring.advance();
#if PAGE_CODES
      rule = rule_of_keys.scaled(k_scale[tile.kv_head]);
#endif
      if (is_idle)
        skip(tile);
      else
        process(tile, q, lane_idx, first_column, epilogue);
    }
  }

 private:
  template <typename Epilogue>
  __device__ __forceinline__ void process(const WorkTile& tile,
                                          const unsigned (&q)[kHeadDim / 16][4], int lane_idx,
                                          int first_column, const Epilogue& epilogue) {
    const int row = lane_idx / 4;
    const int tokens[2] = {row / problem.group, (row + 8) / problem.group};
    const KeyTileRange range = key_tile_range<kKeys>(problem, tile, 0, tile.tokens - 1);
    OnlineSoftmax<kKeys> softmax;
    softmax.start();
    float o[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o[i] = 0.0f;
#pragma unroll 1
    for (int n = tile.end - 1; n >= tile.begin; --n) {
      float s[kKeys / 2];
      mbarrier_wait(smem.k_full + 8 * k_ring.stage, k_ring.phase);
      multiply_qk(s, q, lane_idx);
      mbarrier_arrive(smem.k_empty + 8 * k_ring.stage);
      k_ring.advance();
      if constexpr (kSoftcap) {
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) s[i] = rule.cap(s[i]);
      }
      if (n >= range.whole_end || n < range.whole_begin) {
        const int last = tile.last_key_of_first_token - n * kKeys - 2 * (lane_idx % 4);
        const int lasts[2] = {last + (problem.causal ? tokens[0] : 0),
                              last + (problem.causal ? tokens[1] : 0)};
        const unsigned reach[2] = {problem.reach, problem.reach};
        mask_scores<kKeys>(s, lasts, reach);
      }
      if (softmax.raise(s, rule.factor)) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) o[i] *= softmax.rescale[i / 2 % 2];
      }
      unsigned p[kKeys / 16][4];
      softmax.exponentials(p, s, rule.factor);
      mbarrier_wait(smem.v_full + 8 * v_ring.stage, v_ring.phase);
      multiply_pv(o, p, lane_idx, first_column);
      mbarrier_arrive(smem.v_empty + 8 * v_ring.stage);
      v_ring.advance();
    }
    softmax.add_up();
    epilogue(tile, row, tokens, lane_idx, o, softmax.base, softmax.sum);
  }

  // Releases the key tiles of a work tile for a warp that has no columns.
  __device__ __forceinline__ void skip(const WorkTile& tile) {
#pragma unroll 1
    for (int n = tile.end - 1; n >= tile.begin; --n) {
      mbarrier_wait(smem.k_full + 8 * k_ring.stage, k_ring.phase);
      mbarrier_arrive(smem.k_empty + 8 * k_ring.stage);
      k_ring.advance();
      mbarrier_wait(smem.v_full + 8 * v_ring.stage, v_ring.phase);
      mbarrier_arrive(smem.v_empty + 8 * v_ring.stage);
      v_ring.advance();
    }
  }

  // The 16 rows of Q as operands A.
  __device__ __forceinline__ void load_queries(unsigned (&q)[kHeadDim / 16][4], int lane_idx) {
    const int row = lane_idx % 16;
    const unsigned from = smem.q + q_ring.stage * kQBytes + row * 128;
    const unsigned swizzle = (lane_idx / 16 ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i)
      ldmatrix_x4(q[i], from + i / 4 * kQChunk + (i % 4 * 32 ^ swizzle));
  }

  // S = Q K^T of the key tile in the current stage.
  __device__ __forceinline__ void multiply_qk(float (&scores)[kKeys / 2],
                                              const unsigned (&q)[kHeadDim / 16][4],
                                              int lane_idx) const {
    float s[kKeys / 8][4] = {};
    const int row = lane_idx / 16 * 8 + lane_idx % 8;
    const unsigned from = smem.k + k_ring.stage * kKeyBytes + row * 128;
    const unsigned swizzle = (lane_idx / 8 % 2 ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i)
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        unsigned k[4];
        ldmatrix_x4(k, from + i / 4 * kKeyChunk + j * 16 * 128 + (i % 4 * 32 ^ swizzle));
        mma_m16n8k16<scalar_t>(s[2 * j], q[i], {k[0], k[1]});
        mma_m16n8k16<scalar_t>(s[2 * j + 1], q[i], {k[2], k[3]});
      }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) scores[i] = s[i / 4][i % 4];
  }

  // O += P V for the warp's columns of V in the current stage.
  __device__ __forceinline__ void multiply_pv(float (&o)[kColumns / 2],
                                              const unsigned (&p)[kKeys / 16][4], int lane_idx,
                                              int first_column) const {
    float sums[kColumns / 8][4];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sums[i / 4][i % 4] = o[i];
    const int row = lane_idx % 16;
    const unsigned from =
        smem.v + v_ring.stage * kValueBytes + first_column / 64 * kKeyChunk + row * 128;
    const unsigned swizzle = (lane_idx / 16 ^ row % 8) * 16 ^ first_column % 64 * 2;
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j)
#pragma unroll
      for (int d = 0; d < kColumns / 16; ++d) {
        unsigned v[4];
        ldmatrix_x4_trans(v, from + j * 16 * 128 + (d * 32 ^ swizzle));
        mma_m16n8k16<scalar_t>(sums[2 * d], p[j], {v[0], v[1]});
        mma_m16n8k16<scalar_t>(sums[2 * d + 1], p[j], {v[2], v[3]});
      }
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o[i] = sums[i / 4][i % 4];
  }
};
