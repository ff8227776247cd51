// The roles of attention_prefill_sm90: of a producer's warpgroup one warp takes tiles and loads Q,
// one loads K and V, and two help it where pages are small; consumer warpgroups of 64 rows each
// turn them into sums.
#pragma once

#include "common/attention_tiles.cuh"
#include "attention_prefill/softmax_sm90.cuh"

template <int kHeadDim, int kConsumers, int kKeys, int kStages, int kQStages, bool kPattern>
struct Prefill {
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kChunks = (kHeadDim + 63) / 64;  // of 64 columns, 128 bytes
  static constexpr int kQChunk = kRows * 128, kQBytes = kChunks * kQChunk;
  static constexpr int kKeyChunk = kKeys * 128, kKeyBytes = kChunks * kKeyChunk;
  static constexpr int kBoxes = kKeys / 16;  // of a tile of keys, at most: a page has 16 or more
  static constexpr int kBarriers = 3 * kQStages + 5 * kStages + 1;
  static constexpr int kSharedBytes = 1024 + kQStages * kQBytes + 2 * kStages * kKeyBytes +
                                      kQStages * static_cast<int>(sizeof(TileWork)) +
                                      8 * kBarriers + 4 * kStages * (1 + kBoxes);
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kPattern ? 56 : 40;
  static constexpr int kConsumerRegisters = (65536 / 128 - kProducerRegisters) / kConsumers / 8 * 8;
  static_assert(!kPattern || kKeys <= 128, "a thread's keys have one bit each of a register");

  // Shared memory, by address.
  unsigned q, k, v, planned, q_full, q_empty, k_full, k_empty, v_full, v_empty, v_whole, boxes_full;
  TileWork* work;
  int* note;  // for each stage, with a pattern: its key tile and the flags below
  static constexpr int kMore = 1 << 30, kMasked = 1 << 29;
  int* boxes;  // for each stage: the rows at which its boxes start, for those that help
  static constexpr int kOnlyK = static_cast<int>(1u << 31), kStop = -1;

  __device__ __forceinline__ explicit Prefill(unsigned char* smem) {
    q = (smem_address(smem) + 1023) & ~1023u;
    k = q + kQStages * kQBytes;
    v = k + kStages * kKeyBytes;
    const unsigned works = v + kStages * kKeyBytes;
    work = reinterpret_cast<TileWork*>(smem + (works - smem_address(smem)));
    planned = works + kQStages * sizeof(TileWork);
    q_full = planned + 8 * kQStages;
    q_empty = q_full + 8 * kQStages;
    k_full = q_empty + 8 * kQStages;
    k_empty = k_full + 8 * kStages;
    v_full = k_empty + 8 * kStages;
    v_empty = v_full + 8 * kStages;
    v_whole = v_empty + 8 * kStages;
    boxes_full = v_whole + 8;
    note = reinterpret_cast<int*>(smem + (boxes_full + 8 * kStages - smem_address(smem)));
    boxes = note + kStages;
  }

  __device__ __forceinline__ void init_barriers(const Problem& problem) const {
    // SAFETY: who helps lets a stage of K go when it has read where its boxes start.
    const int helpers = has_help(problem) ? 2 * 32 : 0;
    for (int i = 0; i < kQStages; ++i) {
      mbarrier_init(planned + 8 * i, 1);
      mbarrier_init(q_full + 8 * i, 1);
      mbarrier_init(q_empty + 8 * i, 128 * kConsumers + 32);  // all who read work[i] let it go
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(k_full + 8 * i, 1);
      mbarrier_init(v_full + 8 * i, 1);
      mbarrier_init(k_empty + 8 * i, 4 * kConsumers + helpers);
      mbarrier_init(v_empty + 8 * i, 4 * kConsumers);
      mbarrier_init(boxes_full + 8 * i, kBoxes);  // each lane lets go what it has written
    }
    mbarrier_init(v_whole, 1);
    mbarrier_init_fence();
  }

  // Zeroes Q where some rows of a tile never get a query (a group that does not divide kRows): what
  // lay there could be NaN, and sums would be corrected with every tile, for nothing.
  __device__ __forceinline__ void init_queries(const Problem& problem) const {
    if (problem.group * problem.tile_tokens == kRows) return;
    for (int i = threadIdx.x * 16; i < kQStages * kQBytes; i += kThreads * 16) zero_word(q + i);
    fence_async_proxy();
  }

  static __device__ __forceinline__ void zero_word(unsigned address) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
  }

  // Tiles of keys: each of [begin, end) is seen by some token of those that are asked for, and of
  // [whole_begin, whole_end) they see all. But for a pattern.
  struct Seen {
    int begin, end, whole_begin, whole_end;
  };

  // By tokens [first, last] of a tile; last is less: there are none.
  static __device__ __forceinline__ Seen seen_tiles(const Problem& problem, const TileWork& tile,
                                                    int first, int last) {
    const int first_last = tile.first_last + (problem.causal ? first : 0);
    const int last_last = tile.first_last + (problem.causal ? last : 0);
    Seen seen{tile.begin, min(tile.end, ::max(last_last + kKeys, 0) / kKeys), 0,
              ::max(first_last + 1, 0) / kKeys};
    if (problem.reach < 1u << 31) {
      const int reach = static_cast<int>(problem.reach);
      seen.begin = ::max(seen.begin, ::max(first_last - reach + 1, 0) / kKeys);
      seen.whole_begin = (::max(last_last - reach + 1, 0) + kKeys - 1) / kKeys;
    }
    if (first > last) seen.end = seen.begin;
    return seen;
  }

  // ---- the producer warps ----------------------------------------------------------------------

  // Row of the maps where lane's box of key tile n starts; far outside (so: zeros) where no key is.
  static __device__ __forceinline__ int box_row(const Problem& problem, const TileWork& tile, int n,
                                                int lane) {
    const int key = n * kKeys + lane * problem.box_keys;
    if (problem.block_tables == nullptr) return tile.k_begin + key;
    if (lane * problem.box_keys >= kKeys || key >= tile.num_keys ||
        key + problem.box_keys <= tile.first_key)
      return 0x7fffff00;
    // SAFETY: an id outside the cache is clamped, so a damaged table cannot make us read elsewhere.
    const unsigned id = static_cast<unsigned>(tile.table[key >> problem.block_shift]);
    const int page = min(id, static_cast<unsigned>(problem.num_blocks - 1));
    return ((page * problem.num_kv_heads + tile.kv_head) << problem.block_shift) +
           (key & ((1 << problem.block_shift) - 1));
  }

  // Box number `box` of a tile of keys starts at `row` of the map.
  static __device__ __forceinline__ void load_box(unsigned to, const TensorMap* map,
                                                  const Problem& problem, int head, int row,
                                                  int box, unsigned barrier) {
    if (box * problem.box_keys >= kKeys) return;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      tma_load_3d(to + chunk * kKeyChunk + box * problem.box_keys * 128, map, 64 * chunk, head, row,
                  barrier);
  }

  // A copy takes its warp about 100 cycles. With many a tile, three warps share them; but a walk
  // along a pattern leaves no registers for that.
  static __device__ __forceinline__ bool has_help(const Problem& problem) {
    return !kPattern && 4 * problem.box_keys <= kKeys;
  }

  // Zeroes rows [begin, kKeys) of a tile of V: P is 0 there, but 0 * NaN would reach the sum.
  static __device__ __forceinline__ void zero_rows(unsigned to, int begin) {
    unsigned lane;  // SAFETY: read anew, or what follows from it keeps registers in the whole loop
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    for (int chunk = 0; chunk < kChunks; ++chunk)
      for (int row = begin + lane / 8; row < kKeys; row += 4)
        zero_word(to + chunk * kKeyChunk + row * 128 + lane % 8 * 16);
    fence_async_proxy();
    __syncwarp();
  }

  // Warp 0: takes tiles and loads their Q. It takes them as late as it can, for what one block has
  // taken no other one can do; but where there is one place for Q, while that is still in use.
  __device__ __forceinline__ void plan(const TensorMap* q_map, const Problem& problem) const {
    const int lane = threadIdx.x % 32;
    unsigned tiles = 0;
    const auto await_place = [&] {
      mbarrier_wait(q_empty + tiles % kQStages * 8, tiles / kQStages % 2 ^ 1);
    };
    for (int t = blockIdx.x; t < problem.total;) {
      TileWork tile;
      if (find_tile<kKeys>(problem, t, tile)) {
        if constexpr (kPattern) {
          const int last = tile.position + tile.tokens - 1;
          const TileWalk<kKeys, true> walk(problem.pattern, tile.position, last, tile.begin,
                                           tile.end);
          if (walk.n < tile.begin) tile.end = tile.begin;
        }
        if (kQStages == 1) await_place();
        if (lane == 0) {
          const int q_stage = tiles % kQStages;
          work[q_stage] = tile;
          mbarrier_arrive(planned + 8 * q_stage);
          const unsigned barrier = q_full + 8 * q_stage;
          mbarrier_arrive_expect_tx(barrier, problem.q_bytes);
#pragma unroll
          for (int chunk = 0; chunk < kChunks; ++chunk)
            tma_load_4d(q + q_stage * kQBytes + chunk * kQChunk, q_map, 64 * chunk, 0, tile.kv_head,
                        tile.first_token, barrier);
        }
        ++tiles;
        if (kQStages > 1) await_place();
      }
      if (lane == 0) {
        const int taken = atomicAdd(problem.counter, 1);
        if (taken == problem.total - 1) *problem.counter = 0;  // every block is past its last tile
        t = gridDim.x + taken;
      }
      t = __shfl_sync(~0u, t, 0);
    }
    if (kQStages == 1) await_place();
    if (lane == 0) {
      const int q_stage = tiles % kQStages;
      work[q_stage].first_token = -1;
      mbarrier_arrive(planned + 8 * q_stage);
      mbarrier_arrive(q_full + 8 * q_stage);
    }
  }

  // Warp 1: loads K and V. All that it needs of a tile it reads where the consumers do, as it has
  // few registers.
  __device__ __forceinline__ void load(const TensorMap* k_map, const TensorMap* v_map,
                                       const Problem& problem) const {
    const int lane = threadIdx.x % 32;
    const bool is_helped = has_help(problem), is_dense = problem.block_tables == nullptr;
    int stage = 0;
    unsigned tiles = 0, phases = 1;  // bit 0: of the stages; bit 1: of v_whole
    for (;; ++tiles) {
      mbarrier_wait(planned + tiles % kQStages * 8, tiles / kQStages % 2);
      const TileWork& tile = work[tiles % kQStages];
      if (tile.first_token < 0) break;
      TileWalk<kKeys, kPattern> walk(problem.pattern, tile.position,
                                     tile.position + tile.tokens - 1, tile.begin, tile.end);
      Seen seen{};
      if constexpr (kPattern) seen = seen_tiles(problem, tile, 0, tile.tokens - 1);
      int row = box_row(problem, tile, walk.n, lane);
      while (walk.n >= tile.begin) {
        const int n = walk.n;
        const bool is_whole = walk.is_whole && n >= seen.whole_begin && n < seen.whole_end;
        walk.next();
        mbarrier_wait(k_empty + 8 * stage, phases & 1);
        if (kPattern && lane == 0)
          note[stage] = n | (is_whole ? 0 : kMasked) | (walk.n >= tile.begin ? kMore : 0);
        const int head = is_dense ? tile.kv_head : 0;  // of the maps
        // Rows past the end of all of K and V are zeros already.
        const int valid = tile.num_keys - n * kKeys;
        const bool has_rest =
            valid < kKeys && (!is_dense || tile.k_begin + tile.num_keys < problem.max_keys);
        if (is_helped) ask(stage, has_rest ? row | kOnlyK : row, lane);
        const int box = is_helped ? lane * 3 : lane;
        const int box_start = __shfl_sync(~0u, row, box % 32);
        if (lane == 0) mbarrier_arrive_expect_tx(k_full + 8 * stage, kKeyBytes);
        load_box(k + stage * kKeyBytes, k_map, problem, head, box_start, box, k_full + 8 * stage);
        const int next_row = walk.n >= tile.begin ? box_row(problem, tile, walk.n, lane) : 0;
        mbarrier_wait(v_empty + 8 * stage, phases & 1);
        const unsigned v_stage = v + stage * kKeyBytes;
        if (lane == 0)
          mbarrier_arrive_expect_tx(has_rest ? v_whole : v_full + 8 * stage, kKeyBytes);
        if (has_rest) {
          load_box(v_stage, v_map, problem, head, row, lane, v_whole);
          mbarrier_wait(v_whole, phases >> 1);
          phases ^= 2;
          zero_rows(v_stage, valid);
          if (lane == 0) mbarrier_arrive(v_full + 8 * stage);
        } else {
          load_box(v_stage, v_map, problem, head, box_start, box, v_full + 8 * stage);
        }
        if (++stage == kStages) stage = 0, phases ^= 1;
        row = next_row;
      }
      mbarrier_arrive(q_empty + tiles % kQStages * 8);
    }
    if (is_helped) {
      mbarrier_wait(k_empty + 8 * stage, phases & 1);
      ask(stage, kStop, lane);
    }
  }

  // Tells those that help where the boxes of a stage start.
  __device__ __forceinline__ void ask(int stage, int row, int lane) const {
    if (lane >= kBoxes) return;
    boxes[stage * kBoxes + lane] = row;
    mbarrier_arrive(boxes_full + 8 * stage);
  }

  // Warps 2 and 3: a third of the boxes each.
  __device__ __forceinline__ void help(const TensorMap* k_map, const TensorMap* v_map,
                                       const Problem& problem) const {
    const int box = threadIdx.x % 32 * 3 + threadIdx.x / 32 % 4 - 1;
    unsigned phase = 0;
    for (int stage = 0;;) {
      mbarrier_wait(boxes_full + 8 * stage, phase);
      const int row = boxes[stage * kBoxes + min(box, kBoxes - 1)];
      if (row == kStop) return;
      mbarrier_arrive(k_empty + 8 * stage);
      load_box(k + stage * kKeyBytes, k_map, problem, 0, row & ~kOnlyK, box, k_full + 8 * stage);
      // SAFETY: who fills nothing does not wait, for nothing would wait for him: the phase after
      // next could begin before he looks.
      if (row >= 0 && box * problem.box_keys < kKeys) {
        mbarrier_wait(v_empty + 8 * stage, phase ^ 1);
        load_box(v + stage * kKeyBytes, v_map, problem, 0, row, box, v_full + 8 * stage);
      }
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  }

  // ---- a consumer warpgroup --------------------------------------------------------------------

  static __device__ __forceinline__ void start_scores(float (&s)[kKeys / 2], unsigned q_rows,
                                                      unsigned keys) {
    const uint64_t a = wgmma_descriptor(q_rows), b = wgmma_descriptor(keys);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i)
      wgmma<kKeys>(s, a + (i / 4 * kQChunk + i % 4 * 32) / 16,
                   b + (i / 4 * kKeyChunk + i % 4 * 32) / 16, i != 0);
    wgmma_commit();
  }

  static __device__ __forceinline__ void start_values(float (&o)[kHeadDim / 2],
                                                      const unsigned (&p)[kKeys / 16][4],
                                                      unsigned values) {
    const uint64_t b = wgmma_descriptor_transposed(values, kKeyChunk);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) wgmma_transposed<kHeadDim>(o, p[i], b + i * 2048 / 16);
    wgmma_commit();
  }

  // A thread's first row of the tile, and the tokens of that and of the one eight rows on.
  struct Row {
    int lane, first, tokens[2];
    __device__ __forceinline__ Row(const Problem& problem, int group_index) {
      unsigned tid;  // SAFETY: read anew, or what follows from it keeps registers in the whole loop
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
      lane = tid % 32;
      first = group_index * 64 + tid / 32 % 4 * 16 + lane / 4;
      tokens[0] = first / problem.group;
      tokens[1] = (first + 8) / problem.group;
    }
  };

  template <bool kSoftcap, typename Finish>
  __device__ __forceinline__ void consume(const Problem& problem, ScoreRule rule,
                                          const Finish& finish) const {
    const int group_index = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const int turn = 1 + group_index, next_turn = 1 + (group_index + 1) % kConsumers;
    if (group_index == kConsumers - 1) pair_barrier_arrive(next_turn);

    int q_stage = 0, k_stage = 0, v_stage = 0;
    unsigned q_phase = 0, k_phase = 0, v_phase = 0;
    const auto release = [&](unsigned barrier) {
      if (is_first_lane) mbarrier_arrive(barrier);
    };
    float s[kKeys / 2], o[kHeadDim / 2];
    unsigned p[kKeys / 16][4];
    OnlineSoftmax<kKeys> softmax;

    for (;;) {
      mbarrier_wait(q_full + 8 * q_stage, q_phase);
      const TileWork& tile = work[q_stage];
      const int first_last = tile.first_last, tile_begin = tile.begin;
      if (tile.first_token < 0) return;
      const unsigned q_rows = q + q_stage * kQBytes + group_index * 64 * 128;
      softmax.start();
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;

      Seen seen{};  // by the warpgroup's own tokens
      if constexpr (!kPattern)
        seen = seen_tiles(problem, tile, group_index * 64 / problem.group,
                          min((group_index * 64 + 63) / problem.group, tile.tokens - 1));
      int n = tile.end;  // the present key tile
      bool is_masked = false, more = tile_begin < n;
      const auto begin_tile = [&] {
        if constexpr (kPattern) {
          // SAFETY: the lane that lets the stage go is the one that reads.
          int written = is_first_lane ? note[k_stage] : 0;
          written = __shfl_sync(~0u, written, 0);
          n = written & (kMasked - 1);
          is_masked = written & kMasked;
          more = written & kMore;
        } else {
          more = --n > seen.begin;
          is_masked = n >= seen.whole_end || n < seen.whole_begin;
        }
      };
      const auto prepare = [&] {
        if constexpr (kSoftcap) {
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i) s[i] = rule.cap(s[i]);
        }
        if (!is_masked) return;
        const Row row(problem, group_index);
        int last[2];  // the last keys that the rows see, counted from the thread's first one
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          last[i] = first_last - n * kKeys - 2 * (row.lane % 4);
          if (problem.causal) last[i] += row.tokens[i];
        }
        unsigned reach[2] = {problem.reach, problem.reach};
        if constexpr (kPattern) {
          const int key = n * kKeys + 2 * (row.lane % 4);
          if (problem.reach == 1u << 31 && problem.pattern.has_pieces(kKeys)) {
            int position = tile.position + row.tokens[0];
#pragma unroll 1
            for (int i = 0; i < 2; ++i, position = tile.position + row.tokens[1]) {
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
          int position = tile.position + row.tokens[0];
#pragma unroll 1
          for (int i = 0; i < 2; ++i, position = tile.position + row.tokens[1]) {
            seen[0] = seen[1];
            seen[1] = problem.pattern.sees_of_thread<kKeys>(position, key);
          }
          mask_scores<kKeys>(s, seen);
        } else {
          mask_scores<kKeys>(s, last, reach);
        }
      };
      const auto next_k = [&] {
        if (++k_stage == kStages) k_stage = 0, k_phase ^= 1;
      };
      const auto next_v = [&] {
        if (++v_stage == kStages) v_stage = 0, v_phase ^= 1;
      };

      // To ask whether a stage is full takes some 80 cycles, full or not: it is asked beforehand.
      bool k_is_full = false, v_is_full = false;
      const auto await_k = [&] {
        if (!k_is_full) mbarrier_wait(k_full + 8 * k_stage, k_phase);
      };
      const auto await_v = [&] {
        if (!v_is_full) mbarrier_wait(v_full + 8 * v_stage, v_phase);
      };
      const auto end_scores = [&] {
        wgmma_pin(s);
        release(k_empty + 8 * k_stage);
        next_k();
        prepare();
      };
      const auto end_values = [&] {
        wgmma_wait<0>();
        wgmma_pin(o);
        release(v_empty + 8 * v_stage);
        next_v();
      };
      // Lets a tile go that none of the warpgroup's rows sees.
      const auto skip = [&] {
        mbarrier_wait(k_full + 8 * k_stage, k_phase);
        pair_barrier_wait(turn);
        pair_barrier_arrive(next_turn);
        release(k_empty + 8 * k_stage);
        next_k();
        mbarrier_wait(v_full + 8 * v_stage, v_phase);
        release(v_empty + 8 * v_stage);
        next_v();
      };

      if constexpr (!kPattern) {
#pragma unroll 1
        for (; n > ::max(seen.end, tile_begin); --n) skip();
        more = n > seen.begin;
      }
      const bool any = more;
      if (any) {
        mbarrier_wait(k_full + 8 * k_stage, k_phase);
        pair_barrier_wait(turn);
        wgmma_fence();
        start_scores(s, q_rows, k + k_stage * kKeyBytes);
        pair_barrier_arrive(next_turn);
        begin_tile();
        wgmma_wait<0>();
        end_scores();
        softmax.raise(s, rule.factor);
        softmax.exponentials(p, s, rule.factor);
#pragma unroll 1
        while (more) {
          // P V of these keys is under way while the maxima of the next ones are found: P is free
          // again when they are.
          await_k();
          pair_barrier_wait(turn);
          wgmma_fence();
          start_scores(s, q_rows, k + k_stage * kKeyBytes);
          await_v();
          wgmma_fence();
          start_values(o, p, v + v_stage * kKeyBytes);
          pair_barrier_arrive(next_turn);
          begin_tile();
          wgmma_wait<1>();
          end_scores();
          const bool is_raised = softmax.raise(s, rule.factor);
          wgmma_wait_after(fmaxf(softmax.correction[0], softmax.correction[1]), v_whole);
          end_values();
          k_is_full = more && mbarrier_test_wait(k_full + 8 * k_stage, k_phase);
          v_is_full = mbarrier_test_wait(v_full + 8 * v_stage, v_phase);
          if (is_raised) {
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= softmax.correction[i / 2 % 2];
          }
          softmax.exponentials(p, s, rule.factor);
        }
      }
      const TileWork done = tile;
      mbarrier_arrive(q_empty + 8 * q_stage);
      if (++q_stage == kQStages) q_stage = 0, q_phase ^= 1;
      if (any) {
        await_v();
        wgmma_fence();
        start_values(o, p, v + v_stage * kKeyBytes);
        end_values();
      }
      if constexpr (!kPattern) {
#pragma unroll 1
        for (; n > done.begin; --n) skip();
      }
      softmax.add_up();
      const Row row(problem, group_index);
      finish(done, row.first, row.tokens, row.lane, o, softmax.base, softmax.sum);
    }
  }
};
