// A consumer warpgroup of attention_backward_sm90: computes dK and dV of 64 keys and one half of
// dQ.
#pragma once

#include "attention_backward/attention_backward_tiles_sm90.cuh"

// kWindow: queries see only their last `window` keys, and the mask is causal.
template <int kHeadDim, int kQueries, bool kWindow>
struct BackwardConsumer : Backward<kHeadDim, kQueries> {
  using Base = Backward<kHeadDim, kQueries>;
  using Base::Base;
  using Base::dout, Base::dout_empty, Base::dout_full, Base::dq, Base::dq_empty, Base::dq_full;
  using Base::ds, Base::k, Base::k_full, Base::q, Base::q_empty, Base::q_full, Base::stats;
  using Base::kConsumerWarpgroups, Base::kDsBytes, Base::kDsChunk, Base::kHalfBytes,
      Base::kKeyChunk;
  using Base::kKeys, Base::kQueryTileBytes, Base::kQueryChunkBytes, Base::kStatBytes,
      Base::kStatStride;
  using Base::v, Base::v_full;

  // Starts c (keys x queries) = a b^T.
  static __device__ __forceinline__ void start_scores(float (&c)[kQueries / 2], unsigned keys,
                                                      unsigned rows) {
    const uint64_t a = wgmma_descriptor(keys), b = wgmma_descriptor(rows);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i)
      if (i == 0)
        wgmma_rows_first(c, a, b);
      else
        wgmma_rows_next(c, a + (i / 4 * kKeyChunk + i % 4 * 32) / 16,
                        b + (i / 4 * kQueryChunkBytes + i % 4 * 32) / 16);
    wgmma_commit();
  }

  // Starts sum (keys x columns) += weights (keys x queries) x rows (queries x columns).
  static __device__ __forceinline__ void start_sums(float (&sum)[kHeadDim / 2],
                                                    const unsigned (&weights)[kQueries / 16][4],
                                                    unsigned rows) {
    const uint64_t b = wgmma_descriptor_transposed(rows, kQueryChunkBytes);
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i)
      wgmma_transposed<kHeadDim>(sum, weights[i], b + i * 2048 / 16);
    wgmma_commit();
  }

  // Starts one half of dQ: 64 columns of all queries or, if kQueries = 128, all columns of 64
  // queries.
  __device__ __forceinline__ void start_dq(float (&sum)[32], unsigned ds_tile, int half) const {
    const unsigned a_half = kQueries == 128 ? half * kDsChunk : 0;
    const unsigned b_half = kQueries == 128 ? 0 : half * kKeyChunk;
    const uint64_t a = wgmma_descriptor_transposed(ds_tile + a_half, kDsChunk);
    const uint64_t b = wgmma_descriptor_transposed(k + b_half, kKeyChunk);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      if (i == 0)
        wgmma_columns_first(sum, a, b);
      else
        wgmma_columns_next(sum, a + i * 2048 / 16, b + i * 2048 / 16);
    wgmma_commit();
  }

  // Packs accumulators into an A operand, in pairs of neighbouring queries.
  static __device__ __forceinline__ void pack(unsigned (&to)[kQueries / 16][4],
                                              const float (&from)[kQueries / 2]) {
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w)
        to[i][w] = pack2<scalar_t>(from[8 * i + 2 * w], from[8 * i + 2 * w + 1]);
  }

  // Stores dS to shared memory: one row per key, with queries contiguous in chunks of 64.
  static __device__ __forceinline__ void store_ds(unsigned ds_tile,
                                                  const unsigned (&packed)[kQueries / 16][4],
                                                  int warp_row, int lane_idx) {
    const unsigned row = ds_tile + (warp_row + lane_idx % 16) * 128;
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i)
      stmatrix_x4(row + i / 4 * kDsChunk + (((2 * (i % 4) + lane_idx / 16) ^ (lane_idx % 8)) * 16),
                  packed[i][0], packed[i][1], packed[i][2], packed[i][3]);
    fence_async_proxy();
  }

  // Stores dQ to shared memory, in 16-byte stores, for the warp that adds it to global memory.
  __device__ __forceinline__ void store_dq(const float (&sum)[32], int half, unsigned phase) const {
    mbarrier_wait(dq_empty + 8 * half, phase);
    const unsigned to = dq + half * kHalfBytes + threadIdx.x % 128 * 16;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      st_shared_v4(to + j * 2048, sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
    fence_async_proxy();
    mbarrier_arrive(dq_full + 8 * half);
  }

  // Turns S^T into P^T. Query 8 j + e (counted from the thread's first) sees the thread's key i (0
  // or 1) if 8 j + e >= first[i] and, with a window, 8 j + e < first[i] + window.
  template <bool kMasked>
  static __device__ __forceinline__ void softmax(float (&s)[kQueries / 2], unsigned lse,
                                                 float factor, const int (&first)[2], int window) {
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 sum = ld_shared_v2(lse + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float p = exp2_approx(fmaf(s[4 * j + i], factor, -(i % 2 ? sum.y : sum.x)));
        const int query = 8 * j + i % 2;
        bool seen = query >= first[i / 2];
        if constexpr (kWindow)  // one comparison: a negative difference wraps to a huge value
          seen = static_cast<unsigned>(query - first[i / 2]) < static_cast<unsigned>(window);
        s[4 * j + i] = !kMasked || seen ? p : 0.0f;
      }
    }
  }

  // Turns S^T into P^T; masks only if the warp has a key past the last one that the tile's first
  // query sees, or before the first one that its last query sees.
  static __device__ __forceinline__ void make_p(float (&s)[kQueries / 2], unsigned statistics,
                                                int warp_row, int lane_idx, bool causal, int window,
                                                float factor) {
    const int beyond = warp_row + lane_idx / 4 - ld_shared(statistics + kStatBytes);
    if (__any_sync(~0u, beyond + 8 > 0 || (kWindow && beyond < kQueries - window))) {
      int first[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        first[r] =
            causal ? beyond + 8 * r - 2 * (lane_idx % 4) : (beyond + 8 * r > 0 ? kQueries : 0);
      softmax<true>(s, statistics + lane_idx % 4 * 8, factor, first, window);
    } else {
      const int none[2] = {0, 0};
      softmax<false>(s, statistics + lane_idx % 4 * 8, factor, none, window);
    }
  }

  // Turns dP^T into dS^T, without the factor `scale`.
  static __device__ __forceinline__ void differentiate(float (&dp)[kQueries / 2],
                                                       const float (&p)[kQueries / 2],
                                                       unsigned delta) {
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 sum = ld_shared_v2(delta + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        dp[4 * j + i] = p[4 * j + i] * (dp[4 * j + i] - (i % 2 ? sum.y : sum.x));
    }
  }

  // Indices of a thread, and shared-memory addresses of its warpgroup's keys and values.
  struct Thread {
    int half, lane_idx, warp_row;
    unsigned k, v;
  };

  // Computes the first tile's scores.
  __device__ __forceinline__ void first_scores(float (&s)[kQueries / 2], unsigned keys) const {
    mbarrier_wait(k_full, 0);
    mbarrier_wait(q_full, 0);
    wgmma_fence();
    start_scores(s, keys, q);
    wgmma_wait<0>();
    wgmma_pin(s);
  }

  // Accumulates the query tile of turn `turn`, whose scores are in s, into dK and dV, and hands
  // over its dQ. Leaves the next tile's scores in s.
  __device__ __forceinline__ void add_tile(const Thread& me, int turn, int turns, bool causal,
                                           int window, float factor, float (&s)[kQueries / 2],
                                           float (&dk)[kHeadDim / 2],
                                           float (&dv)[kHeadDim / 2]) const {
    const int stage = turn % 2;
    const unsigned q_tile = q + stage * kQueryTileBytes, dout_tile = dout + stage * kQueryTileBytes;
    const unsigned ds_tile = ds + stage * kDsBytes;
    const unsigned statistics = stats + stage * kStatStride;
    float dp[kQueries / 2], dq_sum[32];
    unsigned p_packed[kQueries / 16][4], ds_packed[kQueries / 16][4];

    // Compute P while dP runs.
    mbarrier_wait(dout_full + 8 * stage, turn / 2 % 2);
    wgmma_fence();
    start_scores(dp, me.v, dout_tile);
    make_p(s, statistics, me.warp_row, me.lane_idx, causal, window, factor);
    pack(p_packed, s);
    wgmma_fence();
    start_sums(dv, p_packed, dout_tile);

    // Compute dS while P^T dO runs.
    wgmma_wait<1>();
    wgmma_pin(dp);
    differentiate(dp, s, statistics + 4 * kQueries + me.lane_idx % 4 * 8);
    pack(ds_packed, dp);
    store_ds(ds_tile, ds_packed, me.warp_row, me.lane_idx);

    // Wait for the next tile's Q. After the last tile, start_scores below reads stale data, and the
    // result is not used.
    if (turn + 1 < turns) mbarrier_wait(q_full + 8 * (stage ^ 1), (turn + 1) / 2 % 2);
    wgmma_fence();
    wgmma_wait<0>();
    wgmma_pin(dv);
    if (me.lane_idx == 0) mbarrier_arrive(dout_empty + 8 * stage);
    wgmma_fence();
    start_sums(dk, ds_packed, q_tile);
    // SAFETY: after the barrier both warpgroups have stored dS. It also frees the other dS buffer:
    // its readers waited for their wgmmas before they arrived here.
    named_barrier_sync<128 * kConsumerWarpgroups>(1);
    wgmma_fence();
    start_dq(dq_sum, ds_tile, me.half);
    wgmma_fence();
    start_scores(s, me.k, q + (stage ^ 1) * kQueryTileBytes);

    // Hand over dQ while the next scores run.
    wgmma_wait<1>();
    wgmma_pin(dk);
    wgmma_pin(dv);
    wgmma_pin(dq_sum);
    mbarrier_arrive(q_empty + 8 * stage);
    store_dq(dq_sum, me.half, (turn & 1) ^ 1);
    wgmma_wait<0>();
    wgmma_pin(s);
  }

  // Accumulates dK and dV of this warpgroup's 64 keys over `turns` query tiles.
  __device__ __forceinline__ void consume(int turns, bool causal, int window, float factor,
                                          float (&dk)[kHeadDim / 2],
                                          float (&dv)[kHeadDim / 2]) const {
    const int half = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    const int lane_idx = threadIdx.x % 32, warp_row = (threadIdx.x - 128) / 32 * 16;
    const Thread me{half, lane_idx, warp_row, k + half * 64 * 128, v + half * 64 * 128};
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.0f;
    if (turns == 0) return;

    float s[kQueries / 2];
    first_scores(s, me.k);
    mbarrier_wait(v_full, 0);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn)
      add_tile(me, turn, turns, causal, window, factor, s, dk, dv);
    // Keeps the code below from being hoisted into the loop, which has no registers to spare.
    wgmma_wait<0>();
    wgmma_pin(dk);
    wgmma_pin(dv);
  }
};
