// A consumer warpgroup of attention_prefill_sm90: computes 64 rows of each work tile.
//
// For each key tile it takes turns with the other warpgroups to start S = Q K^T of this tile and O
// += P V of the preceding one. It finds the row maxima of S while P V runs, then computes P from S.
#pragma once

#include "attention_prefill/attention_prefill_softmax_sm90.cuh"
#include "attention_prefill/attention_prefill_tile_sm90.cuh"

// A thread's first row in the work tile, and the tokens of its two rows; the second is eight rows
// below.
struct ThreadRows {
  int lane_idx, first, tokens[2];

  __device__ __forceinline__ ThreadRows(const Problem& problem, int group_index) {
    unsigned tid;  // reread: derived values would otherwise occupy registers throughout the loop
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    lane_idx = tid % 32;
    first = group_index * 64 + tid / 32 % 4 * 16 + lane_idx / 4;
    tokens[0] = first / problem.group;
    tokens[1] = (first + 8) / problem.group;
  }
};

template <bool kSoftcap>
struct Consumer {
  const SharedMemory& smem;
  const Problem& problem;
  ScoreRule rule;
  const int group_index;  // index of the warpgroup among the consumers
  const bool is_first_lane;
  const int my_turn, next_turn;  // named barriers: this warpgroup's turn, the next one's
  PipelineState<kQStages> q_ring;
  PipelineState<kStages> k_ring, v_ring;
  float s[kKeys / 2], o[kValueDim / 2];
  unsigned p[kKeys / 16][4];
  OnlineSoftmax<kKeys> softmax;
  KeyTileRange range;  // key tiles that the warpgroup's rows see; unused with a pattern
  int n;               // index of the current key tile
  bool is_masked;      // some row does not see all keys of the current tile
  bool more;           // another key tile follows
  bool k_is_full, v_is_full;
#if PAGE_CODES             // only with codes: the members would change the machine code
  const float* k_scale;    // (K,)
  ScoreRule rule_of_keys;  // `rule` without the current head's key scale
#endif

  __device__ __forceinline__ Consumer(const SharedMemory& smem, const Problem& problem,
                                      const ScoreRule& rule)
      : smem(smem),
        problem(problem),
        rule(rule),
        group_index(__shfl_sync(~0u, threadIdx.x / 128, 0)),
        is_first_lane(threadIdx.x % 32 == 0),
        my_turn(1 + group_index),
        next_turn(1 + (group_index + 1) % kConsumerWarpgroups),
        q_ring(0),
        k_ring(0),
        v_ring(0) {
    if (group_index == kConsumerWarpgroups - 1) named_barrier_arrive<256>(next_turn);
  }

  template <typename Epilogue>
  __device__ __forceinline__ void run(const Epilogue& epilogue) {
    for (;;) {
      mbarrier_wait(smem.q_full + 8 * q_ring.stage, q_ring.phase);
      const WorkTile& tile = smem.work[q_ring.stage];
      if (tile.first_token < 0) return;
      const unsigned q_rows = smem.q + q_ring.stage * kQBytes + group_index * 64 * 128;
      start(tile);
      const int last_key_of_first_token = tile.last_key_of_first_token;
      if constexpr (!kPattern) {
        const int end = ::max(range.end, tile.begin);
#pragma unroll 1
        for (; n > end; --n) skip();
        more = n > range.begin;
      }
      const bool any = more;
      if (any) {
        first_keys(tile, last_key_of_first_token, q_rows);
#pragma unroll 1
        while (more) next_keys(tile, last_key_of_first_token, q_rows);
      }
      const WorkTile done = tile;
      mbarrier_arrive(smem.q_empty + 8 * q_ring.stage);
      q_ring.advance();
      if (any) {
        wait_v();
        wgmma_fence();
        start_values();
        end_values();
      }
      if constexpr (!kPattern) {
#pragma unroll 1
        for (; n > done.begin; --n) skip();
      }
      softmax.add_up();
      const ThreadRows rows(problem, group_index);
      epilogue(done, rows.first, rows.tokens, rows.lane_idx, o, softmax.base, softmax.sum);
    }
  }

 private:
  // Resets the state before the first key tile of a work tile.
  __device__ __forceinline__ void start(const WorkTile& tile) {
    softmax.start();
#if PAGE_CODES
    rule = rule_of_keys.scaled(k_scale[tile.kv_head]);
#endif
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) o[i] = 0.0f;
    if constexpr (!kPattern)
      range = key_tile_range<kKeys>(problem, tile, group_index * 64 / problem.group,
                                    min((group_index * 64 + 63) / problem.group, tile.tokens - 1));
    n = tile.end;
    is_masked = k_is_full = v_is_full = false;
    more = tile.begin < n;
  }

  // Processes the first key tile, which has no P V to overlap with.
  __device__ __forceinline__ void first_keys(const WorkTile& tile, int last_key_of_first_token,
                                             unsigned q_rows) {
    mbarrier_wait(smem.k_full + 8 * k_ring.stage, k_ring.phase);
    named_barrier_sync<256>(my_turn);
    wgmma_fence();
    start_scores(q_rows);
    named_barrier_arrive<256>(next_turn);
    begin_key_tile();
    wgmma_wait<0>();
    end_scores(tile, last_key_of_first_token);
    softmax.raise(s, rule.factor);
    softmax.exponentials(p, s, rule.factor);
  }

  // Overlaps P V of the current key tile with the search for the next tile's maxima. After that
  // search P V has ended, and P's registers are free again.
  __device__ __forceinline__ void next_keys(const WorkTile& tile, int last_key_of_first_token,
                                            unsigned q_rows) {
    wait_k();
    named_barrier_sync<256>(my_turn);
    wgmma_fence();
    start_scores(q_rows);
    wait_v();
    wgmma_fence();
    start_values();
    named_barrier_arrive<256>(next_turn);
    begin_key_tile();
    wgmma_wait<1>();
    end_scores(tile, last_key_of_first_token);
    const bool is_raised = softmax.raise(s, rule.factor);
    wgmma_wait_after(fmaxf(softmax.rescale[0], softmax.rescale[1]), smem.v_tail);
    end_values();
    k_is_full = more && mbarrier_test_wait(smem.k_full + 8 * k_ring.stage, k_ring.phase);
    v_is_full = mbarrier_test_wait(smem.v_full + 8 * v_ring.stage, v_ring.phase);
    if (is_raised) {
#pragma unroll
      for (int i = 0; i < kValueDim / 2; ++i) o[i] *= softmax.rescale[i / 2 % 2];
    }
    softmax.exponentials(p, s, rule.factor);
  }

  __device__ __forceinline__ void start_scores(unsigned q_rows) {
    const uint64_t a = wgmma_descriptor(q_rows);
    const uint64_t b = wgmma_descriptor(smem.k + k_ring.stage * kKeyBytes);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i)
      wgmma<kKeys>(s, a + (i / 4 * kQChunk + i % 4 * 32) / 16,
                   b + (i / 4 * kKeyChunk + i % 4 * 32) / 16, i != 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void end_scores(const WorkTile& tile, int last_key_of_first_token) {
    wgmma_pin(s);
    release(smem.k_empty + 8 * k_ring.stage);
    k_ring.advance();
    if constexpr (kSoftcap) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] = rule.cap(s[i]);
    }
    if (is_masked) mask(tile, last_key_of_first_token);
  }

  __device__ __forceinline__ void start_values() {
    const uint64_t b = wgmma_descriptor_transposed(smem.v + v_ring.stage * kValueBytes, kKeyChunk);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) wgmma_transposed<kValueDim>(o, p[i], b + i * 2048 / 16);
    wgmma_commit();
  }
  __device__ __forceinline__ void end_values() {
    wgmma_wait<0>();
    wgmma_pin(o);
    release(smem.v_empty + 8 * v_ring.stage);
    v_ring.advance();
  }

  // Testing whether a stage is full has latency even if it is, so next_keys tests ahead.
  __device__ __forceinline__ void wait_k() {
    if (!k_is_full) mbarrier_wait(smem.k_full + 8 * k_ring.stage, k_ring.phase);
  }
  __device__ __forceinline__ void wait_v() {
    if (!v_is_full) mbarrier_wait(smem.v_full + 8 * v_ring.stage, v_ring.phase);
  }
  __device__ __forceinline__ void release(unsigned barrier) {
    if (is_first_lane) mbarrier_arrive(barrier);
  }

  // Releases a key tile that none of this warpgroup's rows sees.
  __device__ __forceinline__ void skip() {
    mbarrier_wait(smem.k_full + 8 * k_ring.stage, k_ring.phase);
    named_barrier_sync<256>(my_turn);
    named_barrier_arrive<256>(next_turn);
    release(smem.k_empty + 8 * k_ring.stage);
    k_ring.advance();
    mbarrier_wait(smem.v_full + 8 * v_ring.stage, v_ring.phase);
    release(smem.v_empty + 8 * v_ring.stage);
    v_ring.advance();
  }

  // Determines the current key tile; with a pattern, the producer chooses it.
  __device__ __forceinline__ void begin_key_tile() {
    if constexpr (kPattern) {
      // SAFETY: the lane that reads key_tile is the one that releases the stage.
      int written = is_first_lane ? smem.key_tile[k_ring.stage] : 0;
      written = __shfl_sync(~0u, written, 0);
      n = written & (smem.kMasked - 1);
      is_masked = written & smem.kMasked;
      more = written & smem.kMore;
    } else {
      more = --n > range.begin;
      is_masked = n >= range.whole_end || n < range.whole_begin;
    }
  }

  // Sets scores of masked keys to -inf.
  __device__ __forceinline__ void mask(const WorkTile& tile, int last_key_of_first_token) {
    const ThreadRows rows(problem, group_index);
    int last[2];  // the rows' last visible keys, relative to the thread's first key
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      last[i] = last_key_of_first_token - n * kKeys - 2 * (rows.lane_idx % 4);
      if (problem.causal) last[i] += rows.tokens[i];
    }
    unsigned reach[2] = {problem.reach, problem.reach};
    if constexpr (kPattern)
      mask_pattern(tile, rows, last, reach);
    else
      mask_scores<kKeys>(s, last, reach);
  }

  __device__ __forceinline__ void mask_pattern(const WorkTile& tile, const ThreadRows& rows,
                                               int (&last)[2], unsigned (&reach)[2]) {
    const int key = n * kKeys + 2 * (rows.lane_idx % 4);
    int position = tile.position + rows.tokens[0];
    if (problem.reach == 1u << 31 && problem.pattern.has_pieces(kKeys)) {
#pragma unroll 1
      for (int i = 0; i < 2; ++i, position = tile.position + rows.tokens[1]) {
        int width;
        const int end = problem.pattern.piece(position, key, width);
        const int high = min(last[0], end);
        last[0] = last[1], reach[0] = reach[1];
        last[1] = high;
        reach[1] = ::max(high - end + width, 0);
      }
      mask_scores<kKeys>(s, last, reach);
      return;
    }
    mask_scores<kKeys>(s, last, reach);
    unsigned seen[2] = {0u, 0u};
#pragma unroll 1
    for (int i = 0; i < 2; ++i, position = tile.position + rows.tokens[1]) {
      seen[0] = seen[1];
      seen[1] = problem.pattern.sees_of_thread<kKeys>(position, key);
    }
    mask_scores<kKeys>(s, seen);
  }
};
