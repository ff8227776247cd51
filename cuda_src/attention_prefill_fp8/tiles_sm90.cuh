// The roles of attention_prefill_fp8_sm90: a warp that asks for Q, K and V, warps that transpose V,
// and consumer warpgroups of 64 rows each.
//
// wgmma adds products of 8 bits up with some 14 bits: what is less than 2^-13 of a sum is cut off.
// Sums over 16,384 keys lost 2 to 23 % so (a V with a mean lost most). kSumTiles tiles of keys at
// once lose 0.6 % at 4 (measured) and 1.4 % at 8 (emulated), however many follow.
#pragma once

#include "common/attention_tiles.cuh"
#include "attention_prefill_fp8/softmax.cuh"
#include "attention_prefill_fp8/wgmma_fp8.cuh"

template <bool kValue>
struct Constant {
  constexpr operator bool() const { return kValue; }
};
using True = Constant<true>;
using False = Constant<false>;

template <int kHeadDim, int kConsumers, int kStages, int kSpan, bool kTurns, unsigned kLineKeys,
          int kSumTiles>
struct PrefillFp8 {
  static constexpr int kKeys = 128, kQStages = 2, kTransposers = 2;
  static constexpr int kSpans = kKeys / kSpan;  // what a consumer works on at once
  static constexpr int kBlocksAtOnce = 4;       // that a transposing warp has in hand
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kColumns = kHeadDim + 8;  // of the second product: V, then those of ones
  static constexpr int kQBytes = kRows * kHeadDim, kKeyBytes = kKeys * kHeadDim;
  static constexpr int kValueBytes = kColumns * kKeys;
  static constexpr int kSumBytes = kSumTiles ? 128 * kConsumers * kColumns / 2 * 4 : 0;
  static constexpr int kBarriers = 2 * kQStages + 6 * kStages;
  static constexpr int kSharedBytes = 1024 + kQStages * kQBytes +
                                      kStages * (2 * kKeyBytes + kValueBytes) + kSumBytes +
                                      kQStages * static_cast<int>(sizeof(WorkTile)) + 8 * kBarriers;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 56 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 224 : kConsumers == 3 ? 160 : 112;
  using Softmax = SoftmaxFp8<kSpan, kLineKeys, kTurns>;

  // Shared memory, by address: raw is V as it comes, v its transpose.
  unsigned q, v, k, raw, sums;
  unsigned q_full, q_empty, k_full, k_empty, v_full, v_empty, raw_full, raw_empty;
  WorkTile* work;

  __device__ __forceinline__ explicit PrefillFp8(unsigned char* smem) {
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
      mbarrier_init(q_empty + 8 * i, 128 * kConsumers + 32 * kTransposers);  // all read work[i]
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(k_full + 8 * i, 1);
      mbarrier_init(k_empty + 8 * i, 4 * kConsumers);
      mbarrier_init(v_full + 8 * i, 32 * kTransposers);
      mbarrier_init(v_empty + 8 * i, 4 * kConsumers);
      mbarrier_init(raw_full + 8 * i, 1);
      mbarrier_init(raw_empty + 8 * i, 32 * kTransposers);
    }
    mbarrier_init_fence();
  }

  // Writes the ones after V's columns: of the eight columns, each sums an eighth of the keys, as
  // less of a small P is lost to a small sum. And zeroes Q where some rows of a tile never get a
  // query (a group that does not divide kRows): what lay there could be NaN, and such rows would
  // take a new base with every tile, for nothing.
  __device__ __forceinline__ void init_tiles(const Problem& problem) const {
    for (int stage = 0; stage < kStages; ++stage)
      if (threadIdx.x < 64)
        fill(v + stage * kValueBytes + kHeadDim * kKeys + threadIdx.x * 16,
             threadIdx.x / 8 < 4 ? 0x38u << threadIdx.x / 8 * 8 : 0u,
             threadIdx.x / 8 < 4 ? 0u : 0x38u << (threadIdx.x / 8 - 4) * 8);
    if (problem.group * problem.tile_tokens != kRows)
      for (int i = threadIdx.x * 16; i < kQStages * kQBytes; i += kThreads * 16) fill(q + i, 0, 0);
    fence_async_proxy();
  }

  static __device__ __forceinline__ void fill(unsigned address, unsigned even, unsigned odd) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %1, %2};" ::"r"(address), "r"(even), "r"(odd)
                 : "memory");
  }

  // A stage of a ring and the phase of its barriers.
  template <int kCount>
  struct Ring {
    int stage = 0;
    unsigned phase;
    __device__ __forceinline__ explicit Ring(unsigned phase) : phase(phase) {}
    __device__ __forceinline__ void next() {
      if (++stage == kCount) stage = 0, phase ^= 1;
    }
  };

  // ---- the producer warp: one lane -------------------------------------------------------------

  __device__ __forceinline__ void produce(const TensorMap* q_map, const TensorMap* k_map,
                                          const TensorMap* v_map, const Problem& problem) const {
    Ring<kQStages> q_ring(1);
    Ring<kStages> ring(1);
    int next = blockIdx.x;
    while (next < problem.total) {
      const int t = next;
      const int taken = atomicAdd(problem.counter, 1);
      if (taken == problem.total - 1) *problem.counter = 0;  // every block is past its last tile
      next = gridDim.x + taken;
      WorkTile tile;
      if (!find_work_tile<kKeys>(problem, t, tile)) continue;

      mbarrier_wait(q_empty + 8 * q_ring.stage, q_ring.phase);
      work[q_ring.stage] = tile;
      const unsigned q_barrier = q_full + 8 * q_ring.stage;
      mbarrier_arrive_expect_tx(q_barrier, kHeadDim * problem.group * problem.tile_tokens);
      tma_load_4d(q + q_ring.stage * kQBytes, q_map, 0, 0, tile.kv_head, tile.first_token,
                  q_barrier);
      q_ring.next();

      for (int n = tile.end - 1; n >= tile.begin; --n) {
        const int row = tile.k_begin + n * kKeys;
        mbarrier_wait(k_empty + 8 * ring.stage, ring.phase);
        mbarrier_arrive_expect_tx(k_full + 8 * ring.stage, kKeyBytes);
        tma_load_3d(k + ring.stage * kKeyBytes, k_map, 0, tile.kv_head, row,
                    k_full + 8 * ring.stage);
        mbarrier_wait_to_overwrite(raw_empty + 8 * ring.stage, ring.phase);
        mbarrier_arrive_expect_tx(raw_full + 8 * ring.stage, kKeyBytes);
        tma_load_3d(raw + ring.stage * kKeyBytes, v_map, 0, tile.kv_head, row,
                    raw_full + 8 * ring.stage);
        ring.next();
      }
    }
    mbarrier_wait(q_empty + 8 * q_ring.stage, q_ring.phase);
    work[q_ring.stage].first_token = -1;
    mbarrier_arrive(q_full + 8 * q_ring.stage);
  }

  // ---- the warps that transpose V --------------------------------------------------------------

  // A block is 16 keys of 32 columns. ldmatrix moves pairs of columns: bytes are sorted so that a
  // row of the result is one column, 16 keys in the order 0 1 8 9, 2 3 10 11, ...: the order in
  // which a thread's scores follow each other when P becomes the first operand. Even columns of each
  // 16 come first, then the odd ones, so that eight rows lie in eight banks; thus a thread of the
  // consumers gets four columns that follow each other.
  //
  // Of a tile's 8 x D / 32 blocks, kBlocks at once, so that their latencies overlap; keys from
  // `valid` on become zeros, as P is 0 there but 0 * NaN would reach the sum.
  template <bool kIsWhole>
  static __device__ __forceinline__ void transpose_tile(unsigned from, unsigned to, int worker,
                                                        int lane, int valid) {
    constexpr int kGroups = kKeys / 16 / kTransposers, kBlocks = kIsWhole ? kBlocksAtOnce : 1;
    const int row = lane / 8 % 2 * 8 + lane % 8;  // of the first 16 keys
    const int swizzle = kHeadDim == 64 ? row / 2 % 4 : row % 8;
    from += (worker * kGroups * 16 + row) * kHeadDim + ((lane / 16 ^ swizzle) << 4);
    to += lane * kKeys + ((worker * kGroups ^ (lane & 7)) << 4);
#pragma unroll 1
    for (int columns = 0; columns < kHeadDim; columns += 32)
#pragma unroll(kIsWhole ? kGroups : 1)
      for (int group = 0; group < kGroups; group += kBlocks) {
        unsigned x[kBlocks][4];
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
          ldmatrix_transposed_x4(x[i], (from ^ columns) + (group + i) * 16 * kHeadDim);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          unsigned y[4] = {
              __byte_perm(x[i][0], x[i][1], 0x6420), __byte_perm(x[i][0], x[i][1], 0x7531),
              __byte_perm(x[i][2], x[i][3], 0x6420), __byte_perm(x[i][2], x[i][3], 0x7531)};
          if constexpr (!kIsWhole) {
            const int first = (worker * kGroups + group + i) * 16 + 2 * (lane % 4);
            unsigned mask = 0;
#pragma unroll
            for (int key = 0; key < 4; ++key)
              if (first + key / 2 * 8 + key % 2 < valid) mask |= 0xFFu << 8 * key;
#pragma unroll
            for (unsigned& word : y) word &= mask;
          }
          stmatrix_x4((to ^ (group + i) << 4) + columns * kKeys, y[0], y[1], y[2], y[3]);
        }
      }
  }

  __device__ __forceinline__ void transpose(int worker) const {
    const int lane = threadIdx.x % 32;
    Ring<kQStages> q_ring(0);
    Ring<kStages> ring(0);
    for (;;) {
      mbarrier_wait(q_full + 8 * q_ring.stage, q_ring.phase);
      const WorkTile& tile = work[q_ring.stage];
      if (tile.first_token < 0) return;
      const int begin = tile.begin, num_keys = tile.num_keys;
      int n = tile.end;
      mbarrier_arrive(q_empty + 8 * q_ring.stage);
      q_ring.next();
      while (--n >= begin) {
        mbarrier_wait(v_empty + 8 * ring.stage, ring.phase ^ 1);
        mbarrier_wait(raw_full + 8 * ring.stage, ring.phase);
        const unsigned from = raw + ring.stage * kKeyBytes;
        const unsigned to = v + ring.stage * kValueBytes;
        const int valid = num_keys - n * kKeys;
        if (valid >= kKeys) {
          transpose_tile<true>(from, to, worker, recomputed(lane), valid);
        } else {
          transpose_tile<false>(from, to, worker, recomputed(lane), valid);
        }
        fence_async_proxy();
        mbarrier_arrive(v_full + 8 * ring.stage);
        mbarrier_arrive(raw_empty + 8 * ring.stage);
        ring.next();
      }
    }
  }

  // ---- a consumer warpgroup --------------------------------------------------------------------

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

  // A thread's sums, four at a time: those of a warp follow each other.
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

  // factors(tile, row, tokens) -> by what q.k becomes a score in units of log2, of my two rows.
  template <typename Factors, typename Finish>
  __device__ __forceinline__ void consume(const Problem& problem, const Factors& factors,
                                          const Finish& finish) const {
    const int group_index = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    const int lane = threadIdx.x % 32;
    const int turn = 1 + group_index, next_turn = 1 + (group_index + 1) % kConsumers;
    if (kTurns && group_index == kConsumers - 1) named_barrier_arrive<256>(next_turn);
    Ring<kQStages> q_ring(0);
    Ring<kStages> ring(0);
    const auto release = [&](unsigned barrier) {
      if (lane == 0) mbarrier_arrive(barrier);
    };
    // My first row (the other is 8 on), and the tokens of both, made when they are wanted.
    const auto my_row = [&](int (&tokens)[2]) {
      const int thread = recomputed(threadIdx.x);
      const int row = (thread / 128 - 1) * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
      tokens[0] = row / problem.group;
      tokens[1] = (row + 8) / problem.group;
      return row;
    };
    const auto my_sums = [&] {
      const int thread = recomputed(threadIdx.x);
      return sums + (thread / 128 - 1) * (kSumBytes / kConsumers) + thread % 128 * 16;
    };
    float s[kSpan / 2], o[kColumns / 2];
    unsigned p[kSpan / 32][4];

    for (;;) {
      mbarrier_wait(q_full + 8 * q_ring.stage, q_ring.phase);
      const WorkTile& tile = work[q_ring.stage];
      if (tile.first_token < 0) return;
      const int begin = tile.begin * kSpans, end = tile.end * kSpans;
      const int first_last = tile.first_last;
      const unsigned q_rows = q + q_ring.stage * kQBytes + group_index * 64 * kHeadDim;
      int tokens[2];
      const int row = my_row(tokens);
      Softmax softmax(factors(tile, row, tokens));
      // Some rows do not see all of the keys from the span `whole_end` on.
      const int whole_end = ::max(first_last + 1, 0) / kSpan;

      // P of the n-th kSpan keys. Where warpgroups take turns, one makes P while the others
      // multiply; where they do not, more of them side by side hide each other's waits.
      const auto make_p = [&](int n, auto is_first) {
        const int part = n % kSpans;
        if (part == kSpans - 1) mbarrier_wait(k_full + 8 * ring.stage, ring.phase);
        start_scores(s, q_rows, k + ring.stage * kKeyBytes + part * kSpan * kHeadDim);
        wgmma_wait<0>();
        wgmma_pin(s);
        if (part == 0) release(k_empty + 8 * ring.stage);
        if (n >= whole_end) {
          int last[2], tokens[2];
          my_row(tokens);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            last[i] = first_last + (problem.causal ? tokens[i] : 0) - n * kSpan - 2 * (lane % 4);
          Softmax::mask(s, last);
        }
        if constexpr (kTurns) named_barrier_sync<256>(turn);
        return softmax.template step<is_first>(p, s, next_turn);
      };
      const auto add_values = [&](int n, bool accumulate) {
        const int part = n % kSpans;
        if (part == kSpans - 1) mbarrier_wait(v_full + 8 * ring.stage, ring.phase);
        start_values(o, p, v + ring.stage * kValueBytes + part * kSpan, accumulate);
      };

      if (begin < end) {
        if constexpr (kSumTiles) {
#pragma unroll
          for (int i = 0; i < kColumns / 2; ++i) o[i] = 0.0f;
          store_sums(my_sums(), o);
        }
        int n = end - 1;
        make_p(n, True());
        add_values(n, false);
#pragma unroll 1
        while (--n >= begin) {
          const bool is_next = n % kSpans == kSpans - 1;
          const unsigned v_done = v_empty + 8 * ring.stage;
          if (is_next) ring.next();
          const bool changed = make_p(n, False());
          wgmma_pin(o);
          if (is_next) release(v_done);
          if (changed) {
#pragma unroll
            for (int i = 0; i < kColumns / 2; ++i) o[i] *= softmax.correction[i / 2 % 2];
            if (kSumTiles) scale_sums(my_sums(), softmax.correction);
          }
          // Where in the keys it is done must not depend on where the tile of queries ends.
          if (kSumTiles && (n + 1) % (kSumTiles * kSpans) == 0) {
            add_sums(o, my_sums());
            store_sums(my_sums(), o);
#pragma unroll
            for (int i = 0; i < kColumns / 2; ++i) o[i] = 0.0f;
          }
          add_values(n, true);
        }
        wgmma_wait<0>();
        wgmma_pin(o);
        if (kSumTiles) add_sums(o, my_sums());
        release(v_empty + 8 * ring.stage);
        ring.next();
      } else {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) o[i] = 0.0f;
      }
      const WorkTile done = tile;  // read again: the loop has no registers for it
      mbarrier_arrive(q_empty + 8 * q_ring.stage);
      q_ring.next();
      const int last_row = my_row(tokens);
      finish(done, last_row, tokens, lane, o, softmax.base);
    }
  }
};
