// The roles of attention_prefill_sm90: a producer warp that streams Q, K and V to shared memory,
// three more that help it where pages are small, and consumer warpgroups of 64 rows each that turn
// them into sums.
#pragma once

#include "common/attention_tiles.cuh"
#include "common/softmax_sm90.cuh"

template <int kHeadDim, int kConsumers, int kKeys, int kStages, int kQStages, bool kPattern>
struct Prefill {
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kChunks = (kHeadDim + 63) / 64;  // of 64 columns, 128 bytes
  static constexpr int kQChunk = kRows * 128, kQBytes = kChunks * kQChunk;
  static constexpr int kKeyChunk = kKeys * 128, kKeyBytes = kChunks * kKeyChunk;
  static constexpr int kBoxes = kKeys / 16;  // of a tile of keys, at most: a page has 16 or more
  static constexpr int kBarriers = 2 * kQStages + 5 * kStages + 1;
  static constexpr int kSharedBytes = 1024 + kQStages * kQBytes + 2 * kStages * kKeyBytes +
                                      kQStages * static_cast<int>(sizeof(TileWork)) +
                                      8 * kBarriers + 4 * kStages * (1 + kBoxes);
  static constexpr int kExactTiles = 1024 / kKeys;  // the first ones a row sees: OnlineSoftmax
  // O takes so many registers that there are none for a second P: a warpgroup's softmax meets the
  // other's products only, which take longer. So there is time for the maximum of each tile, too.
  static constexpr bool kOneP = kHeadDim > 192;
  static constexpr int kProducerRegisters = kPattern ? 72 : 56;
  static constexpr int kConsumerRegisters = kConsumers != 2 ? 152 : kPattern ? 216 : 224;

  // Shared memory, by address.
  unsigned q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, v_whole, boxes_full;
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
    q_full = works + kQStages * sizeof(TileWork);
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
    const int helpers = has_help(problem) ? 3 * 32 : 0;
    for (int i = 0; i < kQStages; ++i) {
      mbarrier_init(q_full + 8 * i, 1);
      mbarrier_init(q_empty + 8 * i, 128 * kConsumers);  // all threads read work[i], all let it go
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
  // lay there could be NaN, and such rows would renew their base with every tile, for nothing.
  __device__ __forceinline__ void init_queries(const Problem& problem) const {
    if (problem.group * problem.tile_tokens == kRows) return;
    for (int i = threadIdx.x * 16; i < kQStages * kQBytes; i += kThreads * 16) zero_word(q + i);
    fence_async_proxy();
  }

  static __device__ __forceinline__ void zero_word(unsigned address) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
  }

  // All rows of a tile see all of the key tiles [begin, end), but for a pattern.
  static __device__ __forceinline__ void whole_tiles(const Problem& problem, const TileWork& tile,
                                                     int& begin, int& end) {
    end = ::max(tile.first_last + 1, 0) / kKeys;
    begin = 0;
    if (problem.reach < 1u << 31) {
      const int last = tile.first_last +
                       (problem.causal ? min(tile.tokens, problem.tile_tokens) - 1 : 0);
      begin = (::max(last - static_cast<int>(problem.reach) + 1, 0) + kKeys - 1) / kKeys;
    }
  }

  // ---- the producer warps ----------------------------------------------------------------------

  // Row of the maps where lane's box of key tile n starts; far outside (so: zeros) where no key is.
  static __device__ __forceinline__ int box_row(const Problem& problem, const KeySource& keys,
                                                int n, int lane) {
    const int key = n * kKeys + lane * problem.box_keys;
    if (keys.table == nullptr) return keys.k_begin + key;
    if (lane * problem.box_keys >= kKeys || key >= keys.num_keys ||
        key + problem.box_keys <= keys.first_key)
      return 0x7fffff00;
    // SAFETY: an id outside the cache is clamped, so a damaged table cannot make us read elsewhere.
    const unsigned id = static_cast<unsigned>(keys.table[key >> problem.block_shift]);
    const int page = min(id, static_cast<unsigned>(problem.num_blocks - 1));
    return ((page * problem.num_kv_heads + keys.kv_head) << problem.block_shift) +
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

  // A copy takes its warp about 100 cycles. With many a tile, four warps share them; but a walk along
  // a pattern leaves no registers for that.
  static __device__ __forceinline__ bool has_help(const Problem& problem) {
    return !kPattern && 4 * problem.box_keys <= kKeys;
  }

  // Zeroes rows [begin, kKeys) of a tile of V: P is 0 there, but 0 * NaN would reach the sum.
  static __device__ __forceinline__ void zero_rows(unsigned to, int begin, int lane) {
    for (int chunk = 0; chunk < kChunks; ++chunk)
      for (int row = begin + lane / 8; row < kKeys; row += 4)
        zero_word(to + chunk * kKeyChunk + row * 128 + lane % 8 * 16);
    fence_async_proxy();
    __syncwarp();
  }

  __device__ __forceinline__ void produce(const TensorMap* q_map, const TensorMap* k_map,
                                          const TensorMap* v_map, const Problem& problem) const {
    const int lane = threadIdx.x % 32;
    const int total = problem.num_pairs * problem.tiles_of_pair * problem.splits;
    const bool is_helped = has_help(problem);
    int q_stage = 0, stage = 0;
    unsigned q_phase = 1, phase = 1, whole_phase = 0;
    int next = blockIdx.x;
    while (next < total) {
      const int t = next;
      if (lane == 0) {
        const int taken = atomicAdd(problem.counter, 1);
        if (taken == total - 1) *problem.counter = 0;  // every block is past its last tile
        next = gridDim.x + taken;
      }
      TileWork tile;
      KeySource keys;
      const bool exists = find_tile<kKeys>(problem, t, tile, keys);
      next = __shfl_sync(~0u, next, 0);
      if (!exists) continue;

      const int tokens = min(tile.tokens, problem.tile_tokens);
      TileWalk<kKeys, kPattern> walk(problem.pattern, tile.position, tile.position + tokens - 1,
                                     tile.begin, tile.end);
      if (walk.n < tile.begin) tile.end = tile.begin;
      int whole_begin = 0, whole_end = 0;
      if constexpr (kPattern) whole_tiles(problem, tile, whole_begin, whole_end);
      mbarrier_wait(q_empty + 8 * q_stage, q_phase);
      if (lane == 0) {
        work[q_stage] = tile;
        const unsigned barrier = q_full + 8 * q_stage;
        mbarrier_arrive_expect(barrier, kChunks * 128 * problem.group * problem.tile_tokens);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
          tma_load_4d(q + q_stage * kQBytes + chunk * kQChunk, q_map, 64 * chunk, 0, tile.kv_head,
                      tile.first_token, barrier);
      }
      if (++q_stage == kQStages) q_stage = 0, q_phase ^= 1;

      const int head = keys.table == nullptr ? keys.kv_head : 0;  // of the maps
      int row = box_row(problem, keys, walk.n, lane);
      while (walk.n >= tile.begin) {
        const int n = walk.n;
        int written = walk.is_whole && n >= whole_begin && n < whole_end ? n : n | kMasked;
        walk.next();
        if (walk.n >= tile.begin) written |= kMore;
        const int next_row = walk.n >= tile.begin ? box_row(problem, keys, walk.n, lane) : 0;
        const int valid = keys.num_keys - n * kKeys;
        // Rows past the end of all of K and V are zeros already.
        const bool has_rest = valid < kKeys && (keys.table != nullptr ||
                                                keys.k_begin + keys.num_keys < problem.max_keys);
        mbarrier_wait(k_empty + 8 * stage, phase);
        if (kPattern && lane == 0) note[stage] = written;
        if (is_helped) ask(stage, has_rest ? row | kOnlyK : row, lane);
        const int box = is_helped ? lane * 4 : lane;
        const int box_start = __shfl_sync(~0u, row, box % 32);
        if (lane == 0) mbarrier_arrive_expect(k_full + 8 * stage, kKeyBytes);
        load_box(k + stage * kKeyBytes, k_map, problem, head, box_start, box, k_full + 8 * stage);
        mbarrier_wait(v_empty + 8 * stage, phase);
        const unsigned v_stage = v + stage * kKeyBytes;
        if (lane == 0) mbarrier_arrive_expect(has_rest ? v_whole : v_full + 8 * stage, kKeyBytes);
        if (has_rest) {
          load_box(v_stage, v_map, problem, head, row, lane, v_whole);
          mbarrier_wait(v_whole, whole_phase);
          whole_phase ^= 1;
          zero_rows(v_stage, valid, lane);
          if (lane == 0) mbarrier_arrive(v_full + 8 * stage);
        } else {
          load_box(v_stage, v_map, problem, head, box_start, box, v_full + 8 * stage);
        }
        if (++stage == kStages) stage = 0, phase ^= 1;
        row = next_row;
      }
    }
    mbarrier_wait(q_empty + 8 * q_stage, q_phase);
    if (lane == 0) {
      work[q_stage].first_token = -1;
      mbarrier_arrive(q_full + 8 * q_stage);
    }
    if (is_helped) {
      mbarrier_wait(k_empty + 8 * stage, phase);
      ask(stage, kStop, lane);
    }
  }

  // Tells those that help where the boxes of a stage start.
  __device__ __forceinline__ void ask(int stage, int row, int lane) const {
    if (lane >= kBoxes) return;
    boxes[stage * kBoxes + lane] = row;
    mbarrier_arrive(boxes_full + 8 * stage);
  }

  // Warps 1 to 3 of the producer's warpgroup: every fourth box is theirs.
  __device__ __forceinline__ void help(const TensorMap* k_map, const TensorMap* v_map,
                                       const Problem& problem) const {
    const int box = threadIdx.x % 32 * 4 + threadIdx.x / 32;
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

  template <bool kSoftcap, typename Finish>
  __device__ __forceinline__ void consume(const Problem& problem, ScoreRule rule,
                                          const Finish& finish) const {
    const int group_index = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    const int lane = threadIdx.x % 32;
    const int my_row = group_index * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int tokens[2] = {my_row / problem.group, (my_row + 8) / problem.group};
    const int turn = 1 + group_index, next_turn = 1 + (group_index + 1) % kConsumers;
    if (group_index == kConsumers - 1) pair_barrier_arrive(next_turn);

    int q_stage = 0, k_stage = 0, v_stage = 0;
    unsigned q_phase = 0, k_phase = 0, v_phase = 0;
    const auto release = [&](unsigned barrier) {
      if (lane == 0) mbarrier_arrive(barrier);
    };
    float s[kKeys / 2], o[kHeadDim / 2];
    unsigned even[kKeys / 16][4], odd[kKeys / 16][4];  // P, in turns
    OnlineSoftmax<kKeys, kOneP> softmax;

    for (;;) {
      mbarrier_wait(q_full + 8 * q_stage, q_phase);
      const TileWork tile = work[q_stage];
      __syncwarp();
      if (tile.first_token < 0) return;
      const unsigned q_rows = q + q_stage * kQBytes + group_index * 64 * 128;
      const unsigned q_done = q_empty + 8 * q_stage;
      if (++q_stage == kQStages) q_stage = 0, q_phase ^= 1;
      int exact[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int last = tile.first_last + (problem.causal ? tokens[i] : 0);
        exact[i] = min(::max(last, 0) / kKeys, tile.end - 1) - kExactTiles + 1;
      }
      softmax.start(exact);
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;

      int whole_begin = 0, whole_end = 0;
      if constexpr (!kPattern) whole_tiles(problem, tile, whole_begin, whole_end);
      int n = tile.end;  // the present key tile
      bool is_masked = false, more = tile.begin < tile.end;
      const auto begin_tile = [&] {
        if constexpr (kPattern) {
          // SAFETY: the lane that lets the stage go is the one that reads.
          int written = lane == 0 ? note[k_stage] : 0;
          written = __shfl_sync(~0u, written, 0);
          n = written & (kMasked - 1);
          is_masked = written & kMasked;
          more = written & kMore;
        } else {
          more = --n > tile.begin;
          is_masked = n >= whole_end || n < whole_begin;
        }
      };
      const auto prepare = [&] {
        if constexpr (kSoftcap) {
#pragma unroll
          for (int i = 0; i < kKeys / 2; ++i) s[i] = rule.cap(s[i]);
        }
        if (!is_masked) return;
        int last[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          last[i] =
              tile.first_last + (problem.causal ? tokens[i] : 0) - n * kKeys - 2 * (lane % 4);
        unsigned reach[2] = {problem.reach, problem.reach};
        if constexpr (kPattern) {
          if (problem.reach == 1u << 31 && problem.pattern.has_pieces(kKeys)) {
            const int key = n * kKeys + 2 * (lane % 4);
            int position = tile.position + tokens[0];
#pragma unroll 1
            for (int i = 0; i < 2; ++i, position = tile.position + tokens[1]) {
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
        }
        mask_scores<kKeys>(s, last, reach);
        if constexpr (kPattern) {
          unsigned seen[2] = {0u, 0u};
          int position = tile.position + tokens[0];
#pragma unroll 1
          for (int i = 0; i < 2; ++i, position = tile.position + tokens[1]) {
            seen[0] = seen[1];
            seen[1] = problem.pattern.sees_of_thread<kKeys>(position, n * kKeys + 2 * (lane % 4));
          }
          mask_scores<kKeys>(s, seen);
        }
      };
      const auto next_k = [&] {
        if (++k_stage == kStages) k_stage = 0, k_phase ^= 1;
      };
      const auto next_v = [&] {
        if (++v_stage == kStages) v_stage = 0, v_phase ^= 1;
      };

      // Scores and P of the next key tile, while P V of the tile before is under way.
      const auto step = [&](const unsigned (&p)[kKeys / 16][4],
                            unsigned (&next)[kKeys / 16][4]) {
        mbarrier_wait(k_full + 8 * k_stage, k_phase);
        pair_barrier_wait(turn);
        wgmma_fence();
        start_scores(s, q_rows, k + k_stage * kKeyBytes);
        mbarrier_wait(v_full + 8 * v_stage, v_phase);
        wgmma_fence();
        start_values(o, p, v + v_stage * kKeyBytes);
        pair_barrier_arrive(next_turn);
        begin_tile();
        wgmma_wait<1>();
        wgmma_pin(s);
        release(k_empty + 8 * k_stage);
        next_k();
        prepare();
        const bool rescale = softmax.template step<false>(next, s, rule.factor, n);
        wgmma_wait_after(fminf(softmax.sum[0], softmax.sum[1]), v_whole);
        wgmma_wait<0>();
        wgmma_pin(o);
        release(v_empty + 8 * v_stage);
        next_v();
        if (rescale) {
#pragma unroll
          for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= softmax.correction[i / 2 % 2];
        }
      };
      // The same with one P: the products are over before the softmax.
      const auto step_alone = [&](unsigned (&p)[kKeys / 16][4]) {
        mbarrier_wait(k_full + 8 * k_stage, k_phase);
        mbarrier_wait(v_full + 8 * v_stage, v_phase);
        pair_barrier_wait(turn);
        wgmma_fence();
        start_values(o, p, v + v_stage * kKeyBytes);
        start_scores(s, q_rows, k + k_stage * kKeyBytes);
        pair_barrier_arrive(next_turn);
        begin_tile();
        wgmma_wait<1>();
        wgmma_pin(o);
        release(v_empty + 8 * v_stage);
        next_v();
        wgmma_wait<0>();
        wgmma_pin(s);
        release(k_empty + 8 * k_stage);
        next_k();
        prepare();
        if (softmax.template step<false>(p, s, rule.factor, n)) {
#pragma unroll
          for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= softmax.correction[i / 2 % 2];
        }
      };
      const auto last_values = [&](const unsigned (&p)[kKeys / 16][4]) {
        mbarrier_arrive(q_done);
        mbarrier_wait(v_full + 8 * v_stage, v_phase);
        wgmma_fence();
        start_values(o, p, v + v_stage * kKeyBytes);
        wgmma_wait<0>();
        wgmma_pin(o);
        release(v_empty + 8 * v_stage);
        next_v();
      };

      if (more) {
        mbarrier_wait(k_full + 8 * k_stage, k_phase);
        wgmma_fence();
        start_scores(s, q_rows, k + k_stage * kKeyBytes);
        begin_tile();
        wgmma_wait<0>();
        wgmma_pin(s);
        release(k_empty + 8 * k_stage);
        next_k();
        prepare();
        softmax.template step<true>(even, s, rule.factor, n);
#pragma unroll 1
        for (;;) {
          if (!more) {
            last_values(even);
            break;
          }
          if constexpr (kOneP) {
            step_alone(even);
          } else {
            step(even, odd);
            if (!more) {
              last_values(odd);
              break;
            }
            step(odd, even);
          }
        }
      } else {
        mbarrier_arrive(q_done);
      }
      softmax.add_up();
      finish(tile, my_row, tokens, lane, o, softmax.base, softmax.sum);
    }
  }
};
