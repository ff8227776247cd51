// Consumer warps of attention_decode_sm90: scores, softmax and P V.
//
// For the scores the warps split a tile's keys; for P V they split the columns of V. They exchange
// each row's maximum and P through shared memory, with one barrier per tile. The scores of tile n +
// 1 are computed before P V of tile n.
#pragma once

#include "attention_decode/attention_decode_codes_sm90.cuh"
#include "attention_decode/attention_decode_new_token_sm90.cuh"
#include "common/mma.cuh"

class Consumer {
 public:
  __device__ __forceinline__ Consumer(unsigned char* smem, const ScoreRule& rule)
      : smem_(smem),
        ring_k_(smem_address(smem)),
        ring_v_(smem_address(smem)),
        queries_(smem_address(smem)),
        rule_(rule) {}

  __device__ __forceinline__ void scale_keys(float key_scale) { rule_ = rule_.scaled(key_scale); }

  // Processes the key tiles of a work tile.
  __device__ __forceinline__ void run(const RowRule& rows, int num_keys, int first_key,
                                      int num_tiles) {
    if constexpr (kCluster == 1 && (!kNewToken || kHasNewTokenWarps)) queries_.wait_full();
    if constexpr (kHasNewTokenWarps)
      new_key_ = *reinterpret_cast<const int*>(smem_ + queries_.new_kv_at() + 2 * kPageRowBytes);
    if constexpr (kQueriesInRegisters) load_queries();
    reset();
    if (num_tiles > 0) tiles(rows, num_keys, first_key, num_tiles);
    if constexpr (kCluster == 1 && kQueryBuffers == 2) queries_.release();  // Q was last read above
  }

  // Computes a sequence's new token to shared memory and, if has_kv, stores its key and value to
  // the pages. `key` is the result of new_key_of. Unused if there are new-token warps.
  __device__ __forceinline__ void compute_new_token(const Cta& cta, int b, bool has_kv, int key) {
    const NewTokenTask task{b, true, has_kv, kQueriesAt, kNewKvAt};
    const NewTokenRow row(cta, task, threadIdx.x / NewTokenRow::kLanes);
    new_key_ = key;
    const NewTokenRow::Inputs inputs = row.inputs(cta.p);
    pdl_wait();  // the preceding kernel writes the rows
    row.compute(cta.p, smem_, inputs);
    barrier();
  }

  // Copies Q to shared memory. Only clusters use it, as the sequence of their single work tile is
  // known before its length. Otherwise the producer warp copies Q during the preceding work tile.
  __device__ __forceinline__ void stage_queries(const Queries& from, int num_rows, int group) {
    constexpr int kWords = kRowBytes / 16;
    for (int i = threadIdx.x; i < kRows * kWords; i += kConsumerThreads) {
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

  // Passes the finished rows to a writer such as Output.
  template <typename Writer>
  __device__ __forceinline__ void store(const RowRule& rows, const Writer& writer) {
    float* const sums = reinterpret_cast<float*>(smem_ + kSumsAt);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      float part = sum_[i / 2][i % 2];
      part += __shfl_xor_sync(kFullMask, part, 1);
      part += __shfl_xor_sync(kFullMask, part, 2);
      if (lane_idx() % 4 == 0) sums[row_of(i) * kConsumerWarps + warp_idx()] = part;
    }
    barrier();
    if constexpr (kQuantizesOut && Writer::kIsResult)
      store_quantized(rows, writer, sums);
    else
      store_values(rows, writer, sums);
  }

  // Counts a split as finished. Returns true in all consumer warps if it was the last one; all
  // partials may then be read.
  __device__ __forceinline__ bool is_last(int* counter, int num_splits) const {
    int* const flag = reinterpret_cast<int*>(smem_ + kFlagAt);
    barrier();
    if (threadIdx.x == 0) {
      int before;
      // Releases the writes that the barrier has ordered before it, and acquires those of the other
      // CTAs.
      asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                   : "=r"(before)
                   : "l"(counter)
                   : "memory");
      *flag = before == num_splits - 1;
      if (before == num_splits - 1) *counter = 0;  // reset for the next launch
    }
    barrier();
    return *flag != 0;
  }

 private:
  static constexpr int kWarpRuns = kBoxKeys / kConsumerWarps;  // groups of 8 keys per warp and tile
  static constexpr int kPairs = kWarpRuns / 2;
  static constexpr int kSlice = kHeadDim / kConsumerWarps;  // columns of V per warp
  static constexpr int kSliceWords = kSlice * sizeof(page_t) / 16;
  static_assert(kWarpRuns % 2 == 0 && kSlice % 16 == 0, "ldmatrix_x4 loads two at once");
  using Scores = float[kRowTiles][kWarpRuns][4];
  // With few accumulators q.k is summed in two interleaved chains, over even and odd steps of d: a
  // single chain would be D / 16 dependent mma.
  static constexpr bool kTwoChains = kRowTiles * kWarpRuns <= 2;
  static constexpr float kBaseRange = 8.0f;  // max distance of base below max_, in log2

  // Stores the finished rows, given each warp's sums.
  template <typename Writer>
  __device__ __forceinline__ void store_values(const RowRule& rows, const Writer& writer,
                                               const float* sums) const {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int row = row_of(i);
      if (row >= rows.count) continue;
      const float total =
          over_warps(sums + row * kConsumerWarps, [](float x, float y) { return x + y; });
      if (warp_idx() == 0 && lane_idx() % 4 == 0) writer.row(row, base_[i / 2][i % 2], total);
      const float factor = writer.factor(row, base_[i / 2][i % 2], total);
      const auto to = writer.at(row);
      if constexpr (kHasCodes) {
        store_columns_of_codes(writer, to, i, factor);
      } else {
#pragma unroll
        for (int d = 0; d < kSlice / 8; ++d)
          writer.pair(to, warp_idx() * kSlice + d * 8 + lane_idx() % 4 * 2,
                      o_[i / 2][d][i % 2 * 2] * factor, o_[i / 2][d][i % 2 * 2 + 1] * factor);
      }
    }
  }

  // Stores the finished rows as codes, given each warp's sums; overwrites o_ with the rounded
  // results. The warps have different columns of a row, and exchange the largest magnitudes.
  __device__ __forceinline__ void store_quantized(const RowRule& rows, const Output& output,
                                                  const float* sums) {
    // Buffer 1 is free: it was last read before the barrier above or an earlier one, and the next
    // work tile writes it only after another.
    float* const peaks = maxima(1);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int row = row_of(i);
      const float total =
          over_warps(sums + row * kConsumerWarps, [](float x, float y) { return x + y; });
      const bool is_first = warp_idx() == 0 && lane_idx() % 4 == 0;
      if (is_first && row < rows.count) output.row(row, base_[i / 2][i % 2], total);
      const float factor = row < rows.count ? output.factor(row, base_[i / 2][i % 2], total) : 0.0f;
      float peak = 0.0f;
#pragma unroll
      for (int d = 0; d < kSlice / 8; ++d)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = o_[i / 2][d][i % 2 * 2 + c];
          x = to_float(from_float<scalar_t>(x * factor));
          peak = max_or_nan(peak, fabsf(x));
        }
      peak = lanes_max_or_nan<4>(peak);
      if (lane_idx() % 4 == 0) peaks[row * kConsumerWarps + warp_idx()] = peak;
    }
    barrier();
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int row = row_of(i);
      if (row >= rows.count) continue;
      const float peak = over_warps(peaks + row * kConsumerWarps,
                                    [](float x, float y) { return max_or_nan(x, y); });
      const int64_t index = output.scale_index(row);
      if (warp_idx() == 0 && lane_idx() % 4 == 0) output.scales[index] = code_scale<E4m3>(peak);
      const float factor = code_factor<E4m3>(peak);
      unsigned char* to =
          output.codes + index * kHeadDim + warp_idx() * kSlice + lane_idx() % 4 * 2;
#pragma unroll
      for (int d = 0; d < kSlice / 8; ++d) {
        const float (&x)[4] = o_[i / 2][d];
        *reinterpret_cast<uint16_t*>(to + d * 8) =
            static_cast<uint16_t>(E4m3::pair(x[i % 2 * 2] * factor, x[i % 2 * 2 + 1] * factor));
      }
    }
  }

  // Passes row i of this lane to the writer; for the layout see multiply_pv_codes.
  template <typename Writer, typename To>
  __device__ __forceinline__ void store_columns_of_codes(const Writer& writer, To to, int i,
                                                         float factor) const {
#pragma unroll
    for (int d = 0; d < kSlice / 16; ++d)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        writer.pair(to, warp_idx() * kSlice + d * 16 + lane_idx() % 4 * 4 + c * 2,
                    o_[i / 2][2 * d][i % 2 * 2 + c] * factor,
                    o_[i / 2][2 * d + 1][i % 2 * 2 + c] * factor);
  }

  unsigned char* smem_;
  Ring ring_k_, ring_v_;
  QueryRing queries_;
  ScoreRule rule_;
  int new_key_ = -1;  // index of the new key, which is patched into its tile; -1: none
  uint32_t q_[kQueriesInRegisters ? kRowTiles : 1][kQueriesInRegisters ? kHeadDim / 16 : 1][4];
  float o_[kRowTiles][kSlice / 8][4];
#if PAGE_CODES
  // Only with codes: otherwise the mere presence of the member would change the machine code.
  float query_factor_[2];  // factor of each row of q_
#endif
  // Per row: running maximum (log2), base of O and of the sum (log2), and the sum of P.
  float max_[kRowTiles][2], base_[kRowTiles][2], sum_[kRowTiles][2];

  // With several row tiles no registers are left to keep values that can be recomputed.
  __device__ static __forceinline__ int thread() {
    return kRowTiles > 1 ? recomputed(threadIdx.x) : threadIdx.x;
  }
  __device__ static __forceinline__ int lane_idx() { return thread() % kWarpSize; }
  __device__ static __forceinline__ int warp_idx() { return thread() / kWarpSize; }
  __device__ static __forceinline__ int row_of(int i) { return i * 8 + lane_idx() / 4; }
  // Barrier across the consumer warps.
  __device__ static __forceinline__ void barrier() { named_barrier_sync<kConsumerThreads>(1); }

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
      // After this barrier, this tile's P and the next tile's maxima are complete, and the previous
      // P's buffer is free.
      barrier();
      multiply_pv(i % 2, key, rows.first_key(0), num_keys);
      if (more) exponentiate(s, (i + 1) % 2);
    }
  }

  // Loads operand A of the scores: 16 rows x 16 columns.
  __device__ __forceinline__ void load_query(uint32_t (&frag)[4], int r, int d) const {
    ldmatrix_x4(frag, queries_.q() + (r * 16 + lane_idx() % 16) * kQueryPitch +
                          lane_idx() / 16 * 16 + d * 32);
  }
  __device__ __forceinline__ void load_queries() {
#if PAGE_CODES
    load_queries_for_codes(q_[0], query_factor_, queries_.q());
#else
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) load_query(q_[r][d], r, d);
#endif
    if constexpr (kCluster == 1 && kQueryBuffers == 1 && !kNewToken) queries_.release();
  }

  // Overwrites 16 bytes of a tile that has landed; a __syncwarp must follow before other lanes read
  // them.
  __device__ static __forceinline__ void store_word(unsigned to, const Vec<uint32_t, 4>& x) {
    st_shared_v4(to, x.v[0], x.v[1], x.v[2], x.v[3]);
  }

  // Writes words of the new token's key (kind 0) or value (kind 1) into a tile that has landed, as
  // the copy may have read the pages before the new token was stored. Only the warp that reads
  // these words calls it.
  __device__ __forceinline__ void patch(unsigned tile, int kind, int index, int first_word,
                                        int num_words) const {
    if (lane_idx() < num_words) {
      const int word = first_word + lane_idx(),
                from = queries_.new_kv_at() + kind * kPageRowBytes + word * 16;
      store_word(tile + tile_offset(index, word),
                 *reinterpret_cast<const Vec<uint32_t, 4>*>(smem_ + from));
    }
    __syncwarp();
  }
  __device__ __forceinline__ bool has_new_key(int first_key) const {
    return new_key_ >= first_key && new_key_ < first_key + kTileKeys;
  }

  // Computes masked q.k for this warp's keys of the next tile, and publishes the row maxima to the
  // other warps.
  __device__ __forceinline__ void score(Scores& s, const RowRule& rows, int first_key, int buffer) {
    ring_k_.wait_full_k();
    if constexpr (kNewToken) {
      const int index = has_new_key(first_key) ? index_of(new_key_ - first_key) : -1;
      if (index >= 0 && index / (kWarpRuns * 8) == warp_idx())
        patch(ring_k_.k(), 0, index, 0, kPageRowBytes / 16);
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

#if PAGE_CODES
  __device__ __forceinline__ void multiply_qk(Scores& s) {
    Scores odd;
#pragma unroll
    for (int i = 0; i < kWarpRuns * 4; ++i) at(s, i) = at(odd, i) = 0.0f;
    multiply_qk_codes<kWarpRuns, kTwoChains>(s[0], odd[0], q_[0], ring_k_.k(),
                                             warp_idx() * kWarpRuns * 8);
#pragma unroll
    for (int i = 0; i < kWarpRuns * 4; ++i)
      at(s, i) = (kTwoChains ? at(s, i) + at(odd, i) : at(s, i)) * query_factor_[i % 4 / 2];
  }
#else
  __device__ __forceinline__ void multiply_qk(Scores& s) {
    Scores odd;
#pragma unroll
    for (int i = 0; i < kRowTiles * kWarpRuns * 4; ++i) at(s, i) = at(odd, i) = 0.0f;
    const int index = warp_idx() * kWarpRuns * 8 + lane_idx() / 16 * 8 + lane_idx() % 8;
    const auto load = [&](uint32_t (&frag)[4], int step) {  // runs one step ahead
      ldmatrix_x4(frag, ring_k_.k() + tile_offset(index + step % kPairs * 16,
                                                  step / kPairs * 2 + lane_idx() / 8 % 2));
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
#endif

  // Masks the scores; `sees(row, last key of the row, key)` tells whether the row sees the key.
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
          const int key =
              first_key +
              key_of(code_row((warp_idx() * kWarpRuns + j) * 8 + lane_idx() % 4 * 2 + c));
          if (!sees(row, last_key, key)) s[i / 2][j][i % 2 * 2 + c] = -kInf;
        }
    }
  }
  __device__ __forceinline__ void mask(Scores& s, const RowRule& rows, int first_key) const {
    if (!kNewToken && rows.tree != nullptr)  // tested once: a test per key would dominate the time
      mask(s, rows, first_key,
           [&](int row, int last_key, int key) { return rows.sees(row, last_key, key); });
    else
      mask(s, rows, first_key,
           [&](int, int last_key, int key) { return rows.sees(last_key, key); });
  }

  template <typename Op>
  __device__ static __forceinline__ float over_warps(const float* values, Op op) {
    Vec<float, 4> x = load_vec<float, 4>(values);
    if constexpr (kConsumerWarps == 8) {
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
      if (lane_idx() % 4 == 0)
        maxima(buffer)[row_of(i) * kConsumerWarps + warp_idx()] = top * rule_.factor;
    }
  }

  // Turns scores into P, which all warps read after the next barrier, and rescales O and the sum.
  //
  // P is relative to its own tile's maximum, even if an earlier tile had a higher one: each tile's
  // largest P is then exactly 1, which rounding leaves unchanged. However, the base stays within
  // kBaseRange of the running maximum, so O and the sum grow by at most 2^kBaseRange.
  __device__ __forceinline__ void exponentiate(const Scores& s, int buffer) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      float &max = max_[i / 2][i % 2], &base = base_[i / 2][i % 2];
      const float tile_max = over_warps(maxima(buffer) + row_of(i) * kConsumerWarps, fmaxf);
      max = fmaxf(max, tile_max);
      const float new_base = fmaxf(tile_max, max - kBaseRange);
      const float reference = finite_or_zero(new_base);
      const float rescale = exp2_approx(base - reference);
      base = new_base;
      unsigned char* const to = smem_ + kProbsAt + buffer * kProbBytes + row_of(i) * kProbPitch +
                                warp_idx() * kWarpRuns * 16 + lane_idx() % 4 * 4;
      float part = 0.0f;
#pragma unroll
      for (int j = 0; j < kWarpRuns; ++j) {
        const float x = exp2_approx(fmaf(s[i / 2][j][i % 2 * 2], rule_.factor, -reference));
        const float y = exp2_approx(fmaf(s[i / 2][j][i % 2 * 2 + 1], rule_.factor, -reference));
        part += x + y;
        *reinterpret_cast<uint32_t*>(to + j * 16) = pack2<prob_t>(x, y);
      }
      sum_[i / 2][i % 2] = sum_[i / 2][i % 2] * rescale + part;
#pragma unroll
      for (int d = 0; d < kSlice / 8; ++d) {
        o_[i / 2][d][i % 2 * 2] *= rescale;
        o_[i / 2][d][i % 2 * 2 + 1] *= rescale;
      }
    }
  }

  // Zeroes V of keys outside [begin, end): their P is 0, but 0 * NaN would reach the sum. Each warp
  // clears the columns that it alone reads.
  __device__ __forceinline__ void clear_v(int first_key, int begin, int end) const {
    constexpr int kWords = kSliceWords, kKeysAtOnce = kWarpSize / kWords;
    const int word = warp_idx() * kWords + lane_idx() % kWords;
#pragma unroll
    for (int i = 0; i < kTileKeys / kKeysAtOnce; ++i) {
      const int index = i * kKeysAtOnce + lane_idx() / kWords, key = first_key + key_of(index);
      if (key < begin || key >= end)
        store_word(ring_v_.v() + tile_offset(index, word), Vec<uint32_t, 4>{});
    }
    __syncwarp();
  }

  // O += P V for this warp's columns.
  __device__ __forceinline__ void multiply_pv(int buffer, int first_key, int begin, int end) {
    struct Operands {
      uint32_t p[kRowTiles][4], v[kSlice / 16][4];
    } even, odd;
    const unsigned p = smem_address(smem_) + kProbsAt + buffer * kProbBytes +
                       lane_idx() % 16 * kProbPitch + lane_idx() / 16 * 16;
    const int word = warp_idx() * (kSlice / 8) + lane_idx() / 16;
    unsigned v[kSlice / 16];  // addresses for the first 16 keys; add kStep bytes per 16 keys
    constexpr int kStep = kSwizzled ? 16 * kRowBytes : 2 * kRowBytes;
#pragma unroll
    for (int d = 0; d < kSlice / 16; ++d)
      v[d] = ring_v_.v() + tile_offset(lane_idx() % 16, word + 2 * d);
    const auto load = [&](Operands& to, int j) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) ldmatrix_x4(to.p[r], p + r * 16 * kProbPitch + j * 32);
#pragma unroll
      for (int d = 0; d < kSlice / 16; ++d) ldmatrix_x4_trans(to.v[d], v[d] + j * kStep);
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
    if constexpr (kNewToken) {
      if (has_new_key(first_key))
        patch(ring_v_.v(), 1, index_of(new_key_ - first_key), warp_idx() * kSliceWords,
              kSliceWords);
    }
    if constexpr (kHasCodes) {
      multiply_pv_codes<kSlice>(o_[0], p, ring_v_.v(), warp_idx() * kSliceWords);
    } else {
      load(even, 0);
#pragma unroll(kRowTiles == 1 ? kTileKeys / 32 : 1)
      for (int j = 0; j < kTileKeys / 16; j += 2) {  // loads run one step ahead
        load(odd, j + 1);
        use(even);
        if (j + 2 < kTileKeys / 16) load(even, j + 2);
        use(odd);
      }
    }
    mbarrier_arrive(ring_v_.empty_v());
    ring_v_.advance();
  }
};
