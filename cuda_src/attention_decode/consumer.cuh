// The computing warps of attention_decode_sm90: scores, softmax, P V.
#pragma once

#include "attention_decode/new_token.cuh"

// A writer (see Output) of one part's unfinished rows, whose sums are relative to 2^base.
struct PartialOutput {
  float* o;
  float* stats;

  __device__ __forceinline__ void row(int row, float base, float sum) const {
    store_vec(stats + row * 2, Vec<float, 2>{base, sum});
  }
  __device__ __forceinline__ float factor(float) const { return 1.0f; }
  __device__ __forceinline__ float* at(int row) const { return o + row * kHeadDim; }
  __device__ __forceinline__ void pair(float* row, int column, float x, float y) const {
    store_vec(row + column, Vec<float, 2>{x, y});
  }
};

// The parts' rows in scratch memory: (slots, K, rows, D) and (slots, K, rows, 2).
struct Partials {
  float* o;
  float* stats;
  int num_rows, num_kv_heads, kv_head;

  __device__ __forceinline__ PartialOutput at(int64_t slot) const {
    const int64_t row = (slot * num_kv_heads + kv_head) * num_rows;
    return PartialOutput{o + row * kHeadDim, stats + row * 2};
  }
};

class Consumer {
 public:
  __device__ __forceinline__ Consumer(unsigned char* smem, const ScoreRule& rule)
      : smem_(smem),
        ring_k_(smem_address(smem)),
        ring_v_(smem_address(smem)),
        queries_(smem_address(smem)),
        rule_(rule) {}

  // All keys of a segment.
  __device__ __forceinline__ void run(const RowRule& rows, int num_keys, int first_key,
                                      int num_tiles) {
    if constexpr (kCluster == 1 && (!kFresh || kMakesAhead)) queries_.wait_full();
    if constexpr (kMakesAhead)
      fresh_key_ = *reinterpret_cast<const int*>(smem_ + queries_.fresh_at() + 2 * kRowBytes);
    if constexpr (kQueriesInRegisters) load_queries();
    reset();
    if (num_tiles > 0) tiles(rows, num_keys, first_key, num_tiles);
    if constexpr (kCluster == 1 && kQueryBuffers == 2) queries_.release();  // read until here
  }

  // Where no warps make them ahead: the newest token of a segment's sequence to shared memory; its
  // key and value, where the segment has the last keys, to the pages too.
  __device__ __forceinline__ void make_fresh(const FreshRows& from, const PageLayout& layout,
                                             const Segment& segment, const int* table, int kv_head,
                                             int group) {
    const FreshPlan plan{segment.b,           kv_head,    group,   true,
                         has_newest(segment), kQueriesAt, kFreshAt};
    const FreshToken token(from, layout, plan, threadIdx.x / FreshToken::kLanes);
    fresh_key_ = fresh_key_of(from, layout, segment, table);
    const FreshToken::Inputs inputs = token.inputs(from);
    pdl_wait();  // it writes the rows
    token.make(from, smem_, &inputs);
    barrier();
  }

  // Q to shared memory. In a cluster only, where there is one segment, whose sequence is known
  // before its length is; else the copying warp brings Q while the segment before is worked on.
  __device__ __forceinline__ void stage_queries(const Queries& from, int num_rows, int group) {
    constexpr int kWords = kRowBytes / 16;
    for (int i = threadIdx.x; i < kRows * kWords; i += kKeyWarps * kWarpSize) {
      const int row = i / kWords, word = i % kWords;
      Vec<uint32_t, 4> value{};
      if (row < num_rows)
        value = *reinterpret_cast<const Vec<uint32_t, 4>*>(
            from.q + row / group * from.token_stride + row % group * from.head_stride +
            word * kVec);
      *reinterpret_cast<Vec<uint32_t, 4>*>(smem_ + kQueriesAt + row * kQueryPitch + word * 16) =
          value;
    }
    barrier();
  }

  // Gives the rows to a writer.
  template <typename Writer>
  __device__ __forceinline__ void store(const RowRule& rows, const Writer& writer) {
    float* const sums = reinterpret_cast<float*>(smem_ + kSumsAt);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      float part = sum_[i / 2][i % 2];
      part += __shfl_xor_sync(kFullMask, part, 1);
      part += __shfl_xor_sync(kFullMask, part, 2);
      if (lane() % 4 == 0) sums[row_of(i) * kKeyWarps + key_warp()] = part;
    }
    barrier();
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int row = row_of(i);
      if (row >= rows.count) continue;
      const float total =
          over_warps(sums + row * kKeyWarps, [](float x, float y) { return x + y; });
      if (key_warp() == 0 && lane() % 4 == 0) writer.row(row, base_[i / 2][i % 2], total);
      const float factor = writer.factor(total);
      const auto to = writer.at(row);
#pragma unroll
      for (int d = 0; d < kSlice / 8; ++d)
        writer.pair(to, key_warp() * kSlice + d * 8 + lane() % 4 * 2,
                    o_[i / 2][d][i % 2 * 2] * factor, o_[i / 2][d][i % 2 * 2 + 1] * factor);
    }
  }

  // Counts a part as done. True in all computing warps if all others were: then they may be read.
  __device__ __forceinline__ bool is_last(int* counter, int num_parts) const {
    int* const flag = reinterpret_cast<int*>(smem_ + kFlagAt);
    barrier();
    if (threadIdx.x == 0) {
      int before;
      // Release: all that the barrier has ordered before; acquire: what the other blocks released.
      asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                   : "=r"(before)
                   : "l"(counter)
                   : "memory");
      *flag = before == num_parts - 1;
      if (before == num_parts - 1) *counter = 0;  // for the next launch
    }
    barrier();
    return *flag != 0;
  }

 private:
  static constexpr int kWarpRuns = kUnitKeys / kKeyWarps;  // 8-key columns of scores of a warp
  static constexpr int kPairs = kWarpRuns / 2;
  static constexpr int kSlice = kHeadDim / kKeyWarps;  // columns of V of a warp
  static_assert(kWarpRuns % 2 == 0 && kSlice % 16 == 0, "ldmatrix_x4 loads two at once");
  using Scores = float[kRowTiles][kWarpRuns][4];
  // Sums of q.k in two chains where there are few: each is D / 16 instructions, one after another.
  static constexpr bool kTwoChains = kRowTiles * kWarpRuns <= 2;
  static constexpr float kBaseRange = 8.0f;  // how far below the highest score a base may be, log2

  unsigned char* smem_;
  Ring ring_k_, ring_v_;
  QueryRing queries_;
  ScoreRule rule_;
  int fresh_key_ = -1;  // the key that is patched into its tile; -1: none
  uint32_t q_[kQueriesInRegisters ? kRowTiles : 1][kQueriesInRegisters ? kHeadDim / 16 : 1][4];
  float o_[kRowTiles][kSlice / 8][4];
  // Of a row: the highest score so far, what O and the sum are relative to (log2 both), the sum.
  float max_[kRowTiles][2], base_[kRowTiles][2], sum_[kRowTiles][2];

  // With two row tiles there are no registers to keep what can be computed again.
  __device__ static __forceinline__ int thread() {
    return kRowTiles > 1 ? recomputed(threadIdx.x) : threadIdx.x;
  }
  __device__ static __forceinline__ int lane() { return thread() % kWarpSize; }
  __device__ static __forceinline__ int key_warp() { return thread() / kWarpSize; }
  __device__ static __forceinline__ int row_of(int i) { return i * 8 + lane() / 4; }
  // Of the computing warps.
  __device__ static __forceinline__ void barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(kKeyWarps * kWarpSize) : "memory");
  }

  __device__ static __forceinline__ float& at(Scores& s, int i) {
    return s[i / 4 / kWarpRuns][i / 4 % kWarpRuns][i % 4];
  }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      max_[i / 2][i % 2] = base_[i / 2][i % 2] = -kInf;
      sum_[i / 2][i % 2] = 0.0f;
#pragma unroll
      for (int d = 0; d < kSlice / 8; ++d)
        o_[i / 2][d][i % 2 * 2] = o_[i / 2][d][i % 2 * 2 + 1] = 0.0f;
    }
  }

  __device__ __forceinline__ void tiles(const RowRule& rows, int num_keys, int first_key,
                                        int num_tiles) {
    Scores s;
    score(s, rows, first_key, 0);
    barrier();
    exponentiate(s, 0);
#pragma unroll 1
    for (int i = 0; i < num_tiles; ++i) {
      const bool more = i + 1 < num_tiles;
      const int key = first_key + i * kTileKeys;
      if (more) score(s, rows, key + kTileKeys, (i + 1) % 2);
      // P of this tile and the maxima of the next are there, and all are done with the P before.
      barrier();
      multiply(i % 2, key, rows.first_key(0), num_keys);
      if (more) exponentiate(s, (i + 1) % 2);
    }
  }

  // Operand A of the scores: 16 rows, 16 columns.
  __device__ __forceinline__ void load_query(uint32_t (&frag)[4], int r, int d) const {
    load_matrices(frag,
                  queries_.q() + (r * 16 + lane() % 16) * kQueryPitch + lane() / 16 * 16 + d * 32);
  }
  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) load_query(q_[r][d], r, d);
    if constexpr (kCluster == 1 && kQueryBuffers == 1 && !kFresh) queries_.release();
  }

  // 16 bytes of a tile that has landed; __syncwarp must follow before other lanes read them.
  __device__ static __forceinline__ void store_word(unsigned to, const Vec<uint32_t, 4>& x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.v[0]), "r"(x.v[1]),
                 "r"(x.v[2]), "r"(x.v[3])
                 : "memory");
  }

  // Words of the newest token's key (kind 0) or value (1) to their places in a tile that has landed,
  // which was fetched before they were in the pages, or while. By the warp that alone reads them.
  __device__ __forceinline__ void patch(unsigned tile, int kind, int index, int first_word,
                                        int num_words) const {
    if (lane() < num_words) {
      const int word = first_word + lane(),
                from = queries_.fresh_at() + kind * kRowBytes + word * 16;
      store_word(tile + tile_offset(index, word),
                 *reinterpret_cast<const Vec<uint32_t, 4>*>(smem_ + from));
    }
    __syncwarp();
  }
  __device__ __forceinline__ bool has_fresh(int first_key) const {
    return fresh_key_ >= first_key && fresh_key_ < first_key + kTileKeys;
  }

  // q.k of this warp's keys of the next tile, masked; their maxima go to the others.
  __device__ __forceinline__ void score(Scores& s, const RowRule& rows, int first_key, int buffer) {
    ring_k_.wait_full_k();
    if constexpr (kFresh) {
      const int index = has_fresh(first_key) ? index_of(fresh_key_ - first_key) : -1;
      if (index >= 0 && index / (kWarpRuns * 8) == key_warp())
        patch(ring_k_.k(), 0, index, 0, kRowBytes / 16);
    }
    multiply_qk(s);
    mbarrier_arrive(ring_k_.empty_k());
    ring_k_.advance();
    if (rule_.inner != 0.0f) {
#pragma unroll
      for (int i = 0; i < kRowTiles * kWarpRuns * 4; ++i) at(s, i) = rule_.cap(at(s, i));
    }
    if (first_key < rows.first_key(rows.count - 1) ||
        first_key + kTileKeys - 1 > rows.last_common_key(0))
      mask(s, rows, first_key);
    publish_maxima(s, buffer);
  }

  __device__ __forceinline__ void multiply_qk(Scores& s) {
    Scores odd;
#pragma unroll
    for (int i = 0; i < kRowTiles * kWarpRuns * 4; ++i) at(s, i) = at(odd, i) = 0.0f;
    const int index = key_warp() * kWarpRuns * 8 + lane() / 16 * 8 + lane() % 8;
    const auto load = [&](uint32_t (&frag)[4], int step) {  // always one step ahead
      load_matrices(frag, ring_k_.k() + tile_offset(index + step % kPairs * 16,
                                                    step / kPairs * 2 + lane() / 8 % 2));
    };
    uint32_t frag[2][4];
    load(frag[0], 0);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16 * kPairs; ++step) {
      if (step + 1 < kHeadDim / 16 * kPairs) load(frag[(step + 1) % 2], step + 1);
      const int d = step / kPairs, j = step % kPairs * 2;
      const auto& now = frag[step % 2];
      const uint32_t left[2] = {now[0], now[1]}, right[2] = {now[2], now[3]};
      auto& sums = kTwoChains && d % 2 ? odd : s;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        if constexpr (kQueriesInRegisters) {
          mma_m16n8k16<scalar_t>(sums[r][j], q_[r][d], left);
          mma_m16n8k16<scalar_t>(sums[r][j + 1], q_[r][d], right);
        } else {
          uint32_t frag_q[4];
          load_query(frag_q, r, d);
          mma_m16n8k16<scalar_t>(sums[r][j], frag_q, left);
          mma_m16n8k16<scalar_t>(sums[r][j + 1], frag_q, right);
        }
      }
    }
    if constexpr (kTwoChains)
#pragma unroll
      for (int i = 0; i < kRowTiles * kWarpRuns * 4; ++i) at(s, i) += at(odd, i);
  }

  // `sees` says of (row, last key of the row, key) whether the row sees the key.
  template <typename Sees>
  __device__ __forceinline__ void mask(Scores& s, const RowRule& rows, int first_key,
                                       Sees sees) const {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int row = row_of(i), last_key = rows.last_key(row);
#pragma unroll
      for (int j = 0; j < kWarpRuns; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = first_key + key_of((key_warp() * kWarpRuns + j) * 8 + lane() % 4 * 2 + c);
          if (!sees(row, last_key, key)) s[i / 2][j][i % 2 * 2 + c] = -kInf;
        }
    }
  }
  __device__ __forceinline__ void mask(Scores& s, const RowRule& rows, int first_key) const {
    if (!kFresh && rows.tree != nullptr)  // asked once: it costs more than all the rest
      mask(s, rows, first_key,
           [&](int row, int last_key, int key) { return rows.sees(row, last_key, key); });
    else
      mask(s, rows, first_key,
           [&](int, int last_key, int key) { return rows.sees(last_key, key); });
  }

  template <typename Op>
  __device__ static __forceinline__ float over_warps(const float* values, Op op) {
    Vec<float, 4> x = load_vec<float, 4>(values);
    if constexpr (kKeyWarps == 8) {
      const Vec<float, 4> y = load_vec<float, 4>(values + 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) x.v[i] = op(x.v[i], y.v[i]);
    }
    return op(op(x.v[0], x.v[1]), op(x.v[2], x.v[3]));
  }

  __device__ __forceinline__ float* maxima(int buffer) const {
    return reinterpret_cast<float*>(smem_ + kMaximaAt + buffer * kExchangeBytes);
  }

  __device__ __forceinline__ void publish_maxima(const Scores& s, int buffer) const {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      float top = -kInf;
#pragma unroll
      for (int j = 0; j < kWarpRuns; ++j)
        top = fmaxf(top, fmaxf(s[i / 2][j][i % 2 * 2], s[i / 2][j][i % 2 * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
      if (lane() % 4 == 0) maxima(buffer)[row_of(i) * kKeyWarps + key_warp()] = top * rule_.factor;
    }
  }

  // Scores to P, for all to read after the next barrier. O is what the tiles before have left.
  //
  // P is relative to its own tile's maximum, also where one before was higher: each tile has a P of
  // exactly 1 then, which no rounding changes. But it is at most kBaseRange below the highest, so that
  // O and the sum become no more than 2^kBaseRange times as large.
  __device__ __forceinline__ void exponentiate(const Scores& s, int buffer) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      float &max = max_[i / 2][i % 2], &base = base_[i / 2][i % 2];
      const float tile_max = over_warps(maxima(buffer) + row_of(i) * kKeyWarps, fmaxf);
      max = fmaxf(max, tile_max);
      const float new_base = fmaxf(tile_max, max - kBaseRange);
      const float reference = finite_or_zero(new_base);
      const float rescale = exp2_approx(base - reference);
      base = new_base;
      unsigned char* const to = smem_ + kProbsAt + buffer * kProbBytes + row_of(i) * kProbPitch +
                                key_warp() * kWarpRuns * 16 + lane() % 4 * 4;
      float part = 0.0f;
#pragma unroll
      for (int j = 0; j < kWarpRuns; ++j) {
        const float x = exp2_approx(fmaf(s[i / 2][j][i % 2 * 2], rule_.factor, -reference));
        const float y = exp2_approx(fmaf(s[i / 2][j][i % 2 * 2 + 1], rule_.factor, -reference));
        part += x + y;
        *reinterpret_cast<uint32_t*>(to + j * 16) = pack2<scalar_t>(x, y);
      }
      sum_[i / 2][i % 2] = sum_[i / 2][i % 2] * rescale + part;
#pragma unroll
      for (int d = 0; d < kSlice / 8; ++d) {
        o_[i / 2][d][i % 2 * 2] *= rescale;
        o_[i / 2][d][i % 2 * 2 + 1] *= rescale;
      }
    }
  }

  // Zeroes V of the keys outside [begin, end): their P is 0, but 0 * NaN would reach the sum. Each
  // warp does so in the columns that it alone reads.
  __device__ __forceinline__ void clear_v(int first_key, int begin, int end) const {
    constexpr int kWords = kSlice / 8, kKeysAtOnce = kWarpSize / kWords;
    const int word = key_warp() * kWords + lane() % kWords;
#pragma unroll
    for (int i = 0; i < kTileKeys / kKeysAtOnce; ++i) {
      const int index = i * kKeysAtOnce + lane() / kWords, key = first_key + key_of(index);
      if (key < begin || key >= end)
        store_word(ring_v_.v() + tile_offset(index, word), Vec<uint32_t, 4>{});
    }
    __syncwarp();
  }

  // O += P V for this warp's columns.
  __device__ __forceinline__ void multiply(int buffer, int first_key, int begin, int end) {
    struct Operands {
      uint32_t p[kRowTiles][4], v[kSlice / 16][4];
    } even, odd;
    const unsigned p = smem_address(smem_) + kProbsAt + buffer * kProbBytes +
                       lane() % 16 * kProbPitch + lane() / 16 * 16;
    const int word = key_warp() * (kSlice / 8) + lane() / 16;
    unsigned v[kSlice / 16];  // the first 16 keys; those that follow lie so many bytes further on
    constexpr int kStep = kSwizzled ? 16 * kRowBytes : 2 * kRowBytes;
#pragma unroll
    for (int d = 0; d < kSlice / 16; ++d)
      v[d] = ring_v_.v() + tile_offset(lane() % 16, word + 2 * d);
    const auto load = [&](Operands& to, int j) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) load_matrices(to.p[r], p + r * 16 * kProbPitch + j * 32);
#pragma unroll
      for (int d = 0; d < kSlice / 16; ++d) load_matrices_transposed(to.v[d], v[d] + j * kStep);
    };
    const auto use = [&](const Operands& from) {
#pragma unroll
      for (int d = 0; d < kSlice / 16; ++d) {
        const uint32_t left[2] = {from.v[d][0], from.v[d][1]};
        const uint32_t right[2] = {from.v[d][2], from.v[d][3]};
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma_m16n8k16<scalar_t>(o_[r][2 * d], from.p[r], left);
          mma_m16n8k16<scalar_t>(o_[r][2 * d + 1], from.p[r], right);
        }
      }
    };
    ring_v_.wait_full_v();
    if (first_key < begin || first_key + kTileKeys > end) clear_v(first_key, begin, end);
    if constexpr (kFresh) {
      if (has_fresh(first_key))
        patch(ring_v_.v(), 1, index_of(fresh_key_ - first_key), key_warp() * (kSlice / 8),
              kSlice / 8);
    }
    load(even, 0);
#pragma unroll(kRowTiles == 1 ? kTileKeys / 32 : 1)
    for (int j = 0; j < kTileKeys / 16; j += 2) {  // loads are one step ahead
      load(odd, j + 1);
      use(even);
      if (j + 2 < kTileKeys / 16) load(even, j + 2);
      use(odd);
    }
    mbarrier_arrive(ring_v_.empty_v());
    ring_v_.advance();
  }
};
