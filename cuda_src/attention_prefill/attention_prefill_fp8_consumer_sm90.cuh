// A consumer warpgroup of attention_prefill_fp8_sm90: computes 64 rows of each work tile.
//
// wgmma accumulates 8-bit products with only about 14 bits: addends below 2^-13 of a sum are lost,
// which over many keys is a large part of the total. So the tensor cores accumulate over at most
// kSumTiles key tiles, after which their sums are added to float32 sums in shared memory.
#pragma once

#include "attention_prefill/attention_prefill_fp8_softmax_sm90.cuh"
#include "attention_prefill/attention_prefill_fp8_tile_sm90.cuh"

struct Consumer {
  using Softmax = SoftmaxFp8<kSpan, kLineKeys, kTurns>;

  const SharedMemory& smem;
  const Problem& problem;
  const int group_index;  // index of the warpgroup among the consumers
  const int lane_idx;
  const int my_turn, next_turn;  // named barriers: this warpgroup's turn, the next one's
  PipelineState<kQStages> q_ring;
  PipelineState<kStages> ring;
  float s[kSpan / 2], o[kColumns / 2];
  unsigned p[kSpan / 32][4];

  __device__ __forceinline__ Consumer(const SharedMemory& smem, const Problem& problem)
      : smem(smem),
        problem(problem),
        group_index(__shfl_sync(~0u, threadIdx.x / 128, 0) - 1),
        lane_idx(threadIdx.x % 32),
        my_turn(1 + group_index),
        next_turn(1 + (group_index + 1) % kConsumerWarpgroups),
        q_ring(0),
        ring(0) {
    if (kTurns && group_index == kConsumerWarpgroups - 1) named_barrier_arrive<256>(next_turn);
  }

  // factors(tile, row, tokens) returns, for a thread's two rows, the factors that turn q.k into
  // scores in log2 units.
  template <typename Factors, typename Epilogue>
  __device__ __forceinline__ void run(const Factors& factors, const Epilogue& epilogue) {
    for (;;) {
      mbarrier_wait(smem.q_full + 8 * q_ring.stage, q_ring.phase);
      const WorkTile& tile = smem.work[q_ring.stage];
      if (tile.first_token < 0) return;
      const int begin = tile.begin * kSpans, end = tile.end * kSpans;
      const int last_key_of_first_token = tile.last_key_of_first_token;
      const unsigned q_rows = smem.q + q_ring.stage * kQBytes + group_index * 64 * kHeadDim;
      int tokens[2];
      const int row = thread_rows(tokens);
      Softmax softmax(factors(tile, row, tokens));
      if (begin < end)
        add_keys(softmax, begin, end, last_key_of_first_token, q_rows);
      else
        clear_sums();
      const WorkTile done = tile;  // reread: the loop has no registers to keep it
      mbarrier_arrive(smem.q_empty + 8 * q_ring.stage);
      q_ring.advance();
      const int last_row = thread_rows(tokens);
      epilogue(done, last_row, tokens, lane_idx, o, softmax.base);
    }
  }

 private:
  // Processes a work tile's keys, kSpan at a time; [begin, end) is in units of kSpan keys.
  __device__ __forceinline__ void add_keys(Softmax& softmax, int begin, int end,
                                           int last_key_of_first_token, unsigned q_rows) {
    if constexpr (kSumTiles) {
      clear_sums();
      store_sums(sums_address(), o);
    }
    int n = end - 1;
    make_p<true>(softmax, n, last_key_of_first_token, q_rows);
    add_values(n, false);
#pragma unroll 1
    while (--n >= begin) {
      const bool is_next = n % kSpans == kSpans - 1;
      const unsigned v_done = smem.v_empty + 8 * ring.stage;
      if (is_next) ring.advance();
      const bool changed = make_p<false>(softmax, n, last_key_of_first_token, q_rows);
      wgmma_pin(o);
      if (is_next) release(v_done);
      if (changed) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) o[i] *= softmax.rescale[i / 2 % 2];
        if (kSumTiles) scale_sums(sums_address(), softmax.rescale);
      }
      // Flush at fixed key indices: they must not depend on where the query tile ends.
      if (kSumTiles && (n + 1) % (kSumTiles * kSpans) == 0) {
        add_sums(o, sums_address());
        store_sums(sums_address(), o);
        clear_sums();
      }
      add_values(n, true);
    }
    wgmma_wait<0>();
    wgmma_pin(o);
    if (kSumTiles) add_sums(o, sums_address());
    release(smem.v_empty + 8 * ring.stage);
    ring.advance();
  }

  // Computes P of the n-th kSpan keys. With turns, one warpgroup computes P while the others
  // multiply; without turns, several warpgroups hide each other's latency.
  template <bool kIsFirst>
  __device__ __forceinline__ bool make_p(Softmax& softmax, int n, int last_key_of_first_token,
                                         unsigned q_rows) {
    const int part = n % kSpans;
    if (part == kSpans - 1) mbarrier_wait(smem.k_full + 8 * ring.stage, ring.phase);
    start_scores(s, q_rows, smem.k + ring.stage * kKeyBytes + part * kSpan * kHeadDim);
    wgmma_wait<0>();
    wgmma_pin(s);
    if (part == 0) release(smem.k_empty + 8 * ring.stage);
    const int first_masked = ::max(last_key_of_first_token + 1, 0) / kSpan;
    if (n >= first_masked) {  // some row does not see all of these keys
      int last[2], tokens[2];
      thread_rows(tokens);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        last[i] = last_key_of_first_token + (problem.causal ? tokens[i] : 0) - n * kSpan -
                  2 * (lane_idx % 4);
      Softmax::mask(s, last);
    }
    if constexpr (kTurns) named_barrier_sync<256>(my_turn);
    return softmax.step<kIsFirst>(p, s, next_turn);
  }

  __device__ __forceinline__ void add_values(int n, bool accumulate) {
    const int part = n % kSpans;
    if (part == kSpans - 1) mbarrier_wait(smem.v_full + 8 * ring.stage, ring.phase);
    start_values(o, p, smem.v + ring.stage * kValueBytes + part * kSpan, accumulate);
  }

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o[i] = 0.0f;
  }
  __device__ __forceinline__ void release(unsigned barrier) {
    if (lane_idx == 0) mbarrier_arrive(barrier);
  }

  // Returns the thread's first row (the second is eight rows below), and the tokens of both.
  // Recomputed on each use, as the loop has no registers to keep them.
  __device__ __forceinline__ int thread_rows(int (&tokens)[2]) const {
    const int thread = recomputed(threadIdx.x);
    const int row = (thread / 128 - 1) * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
    tokens[0] = row / problem.group;
    tokens[1] = (row + 8) / problem.group;
    return row;
  }
  __device__ __forceinline__ unsigned sums_address() const {
    const int thread = recomputed(threadIdx.x);
    return smem.sums + (thread / 128 - 1) * (kSumBytes / kConsumerWarpgroups) + thread % 128 * 16;
  }

  static __device__ __forceinline__ void start_scores(float (&s)[kSpan / 2], unsigned q_rows,
                                                      unsigned keys) {
    const uint64_t a = wgmma_descriptor_rows<kHeadDim>(q_rows);
    const uint64_t b = wgmma_descriptor_rows<kHeadDim>(keys);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) wgmma_fp8<kSpan>(s, a + 2 * i, b + 2 * i, i != 0);
    wgmma_commit();
  }

  static __device__ __forceinline__ void start_values(float (&o)[kColumns / 2],
                                                      const unsigned (&p)[kSpan / 32][4],
                                                      unsigned values, bool accumulate) {
    const uint64_t b = wgmma_descriptor_rows<kKeys>(values);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSpan / 32; ++i)
      wgmma_fp8<kColumns>(o, p[i], b + 2 * i, accumulate || i != 0);
    wgmma_commit();
  }

  // Loads a thread's float32 sums, four at a time; the accesses of a warp are contiguous.
  static __device__ __forceinline__ void load_sums(float (&x)[kColumns / 2], unsigned address) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 4)
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3])
                   : "r"(address + i / 4 * 2048)
                   : "memory");
  }
  static __device__ __forceinline__ void store_sums(unsigned address,
                                                    const float (&x)[kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 4)
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address + i / 4 * 2048),
                   "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]), "f"(x[i + 3])
                   : "memory");
  }
  static __device__ __forceinline__ void add_sums(float (&o)[kColumns / 2], unsigned address) {
    float x[kColumns / 2];
    load_sums(x, address);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o[i] += x[i];
  }

  static __device__ __forceinline__ void scale_sums(unsigned address, const float (&by)[2]) {
#pragma unroll 1
    for (int i = 0; i < kColumns / 8; ++i, address += 2048) {
      float x[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                   : "r"(address)
                   : "memory");
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0] * by[0]),
                   "f"(x[1] * by[0]), "f"(x[2] * by[1]), "f"(x[3] * by[1])
                   : "memory");
    }
  }
};
