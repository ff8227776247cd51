// Shared by all attention_backward kernels: masking, one element's gradient, row tiles in shared
// memory, and row statistics.
#pragma once

#include "common/attention.cuh"
#include "common/attention_pattern.cuh"

// One sequence, and which of its queries see which of its keys.
struct Sequence {
  static constexpr bool kHasPattern = false;
  int64_t q_begin, k_begin;  // first row of the sequence in Q and in K
  int num_q, num_k;
  int last_key_of_first_query;  // negative: that query sees no key
  int causal;      // 1: each query sees one key more than the previous; 0: all see the same keys
  unsigned reach;  // number of keys a query sees, up to its last key: the window, or 2^31

  // SAFETY: offsets are clamped to the arrays' sizes.
  __device__ __forceinline__ Sequence(const int* cu_seqlens_q, const int* cu_seqlens_k, int b,
                                      int total_q, int total_k, int causal, int window)
      : causal(causal), reach(window > 0 ? static_cast<unsigned>(window) : 1u << 31) {
    const int q = min(max(cu_seqlens_q[b], 0), total_q);
    const int k = min(max(cu_seqlens_k[b], 0), total_k);
    num_q = min(max(cu_seqlens_q[b + 1], q), total_q) - q;
    num_k = min(max(cu_seqlens_k[b + 1], k), total_k) - k;
    q_begin = q;
    k_begin = k;
    last_key_of_first_query = causal ? num_k - num_q : num_k - 1;
  }

  __device__ __forceinline__ int last_key(int query) const {
    return last_key_of_first_query + causal * query;  // one multiply-add
  }
  __device__ __forceinline__ int first_key(int query) const {
    return reach < 1u << 31 ? max(0, last_key(query) - static_cast<int>(reach) + 1) : 0;
  }
  // One unsigned comparison checks both bounds: a negative difference wraps to a huge value.
  __device__ __forceinline__ bool sees(int query, int key) const {
    return static_cast<unsigned>(last_key(query) - key) < reach;
  }
  // Bounds of the queries that see any of the keys [begin, end).
  __device__ __forceinline__ int first_query(int begin) const {
    return causal ? max(0, begin - last_key_of_first_query) : 0;
  }
  __device__ __forceinline__ int end_query(int end) const {
    if (reach == 1u << 31) return num_q;
    const int64_t last = static_cast<int64_t>(end) - 1 - last_key_of_first_query + reach;
    return static_cast<int>(min(static_cast<int64_t>(num_q), max(last, static_cast<int64_t>(0))));
  }
};

// A query sees a key only if both Sequence and a pattern allow it.
struct PatternSequence : Sequence {
  static constexpr bool kHasPattern = true;
  Pattern pattern;
  int first_position;  // position of query 0: key index if causal, otherwise query index

  __device__ __forceinline__ PatternSequence(const Sequence& sequence, const Pattern& pattern)
      : Sequence(sequence),
        pattern(pattern),
        first_position(sequence.causal ? sequence.last_key_of_first_query : 0) {}

  __device__ __forceinline__ bool in_pattern(int query, int key) const {
    return pattern.sees(first_position + query, key);
  }
};

// Part of a tile of queries and keys that a pattern hides.
enum class Hides { kAll, kSome, kNothing };

// Returns the part that a pattern hides of `queries` queries from `query` on and `keys` keys from
// `key` on. Without a pattern the answer is known at compile time.
template <typename AnySequence>
__device__ __forceinline__ Hides hides(const AnySequence& sequence, int query, int queries, int key,
                                       int keys) {
  if constexpr (AnySequence::kHasPattern) {
    const int last = min(query + queries, sequence.num_q) - 1;
    const int seen = sequence.pattern.sees_tile(sequence.first_position + query,
                                                sequence.first_position + last, key, key + keys);
    return seen == 0 ? Hides::kAll : seen == 3 ? Hides::kNothing : Hides::kSome;
  } else {
    return Hides::kNothing;
  }
}

// The tiles [0, count) of the stream that a pattern does not hide from the row tile, in ascending
// order; without a pattern, all. `hidden_of(i)` is the part of tile i that the pattern hides. Each
// warp has its own iterator, and all of its lanes must call next() together.
template <bool kPattern, typename HiddenOf>
struct VisibleTiles {
  __device__ __forceinline__ VisibleTiles(const HiddenOf& hidden_of, int count)
      : hidden_of(hidden_of), count(count), tile(0), chunk(-32), seen(0), whole(0) {
    next();
  }

  // Turn i is that after i calls of next(). Turns before 0 have no tile: the caller only loads.
  __device__ __forceinline__ bool has_turn(int turn) const {
    return kPattern ? turn < 0 || tile < count : turn < count;
  }
  __device__ __forceinline__ int at(int turn) const { return kPattern ? tile : turn; }
  // Returns the part of the current tile that the pattern hides.
  __device__ __forceinline__ Hides hidden() const {
    return !kPattern || whole >> (tile - chunk) & 1 ? Hides::kNothing : Hides::kSome;
  }

  __device__ __forceinline__ void next() {
    if constexpr (kPattern) {
      while (seen == 0) {
        chunk += 32;
        if (chunk >= count) {
          tile = count;
          return;
        }
        const int mine = chunk + static_cast<int>(threadIdx.x % 32);
        const Hides kind = mine < count ? hidden_of(mine) : Hides::kAll;
        seen = __ballot_sync(~0u, kind != Hides::kAll);
        whole = __ballot_sync(~0u, kind == Hides::kNothing);
      }
      tile = chunk + __ffs(seen) - 1;
      seen &= seen - 1;
    }
  }

 private:
  const HiddenOf& hidden_of;
  const int count;
  int tile;
  int chunk;             // tile that bit 0 of the masks represents
  unsigned seen, whole;  // tiles to come that are visible; tiles of which nothing is hidden
};

// Tells whether a query sees a key of a tile of which the pattern hides `hidden`.
template <typename AnySequence>
__device__ __forceinline__ bool sees(const AnySequence& sequence, Hides hidden, int query,
                                     int key) {
  bool seen = sequence.sees(query, key);
  if constexpr (AnySequence::kHasPattern)
    if (hidden != Hides::kNothing) seen = seen && sequence.in_pattern(query, key);
  return seen;
}

struct Gradient {
  float p;   // softmax probability
  float ds;  // gradient of the score, without `scale`
};

// Gradient of one query and key. `dot` is q.k, `dp` is dout.v; `lse` and `delta` are the query's
// log2-sum-exp2 and sum(dout * out).
template <bool kSoftcap>
__device__ __forceinline__ Gradient gradient(const ScoreRule& rule, float dot, float dp, float lse,
                                             float delta, bool seen) {
  float slope = 1.0f;
  if constexpr (kSoftcap) {
    dot = rule.cap(dot);
    slope = 1.0f - dot * dot;
  }
  const float p = exp2_approx(fmaf(dot, rule.factor, -lse));
  // SAFETY: selects rather than multiplies, as a masked value may be infinite or NaN.
  return {seen ? p : 0.0f, seen ? p * (dp - delta) * slope : 0.0f};
}

// Converts a log-sum-exp to base 2. A query without keys gets +inf, so that its p is 0.
__device__ __forceinline__ float log2_sum(float lse) { return lse == -kInf ? kInf : lse * kLog2E; }

// Rows of one head and sequence in an array (tokens, heads, D).
struct Rows {
  const scalar_t* first;
  int64_t stride;
  int count;
  int head_dim;
  bool is_vector;  // every row consists of whole, aligned 16-byte words
};

// Starts copying rows [begin, begin + kRows) to smem, with zeros past the last row.
template <int kHeadDim, int kRows, int kThreads>
__device__ __forceinline__ void load_rows(scalar_t* smem, const Rows& rows, int begin) {
  using Layout = TileLayout<kHeadDim>;
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * Layout::kWords; i += kThreads) {
    const int row = i / Layout::kWords, word = i % Layout::kWords;
    const bool valid = begin + row < rows.count;
    const scalar_t* from = rows.first + (valid ? (begin + row) * rows.stride : 0);
    scalar_t* const to = smem + Layout::offset(row, word);
    if (rows.is_vector)
      load_word<true>(to, from, word, rows.head_dim, valid);
    else
      load_word<false>(to, from, word, rows.head_dim, valid);
  }
}

// Loads the statistics of queries [begin, begin + kRows) of one head: log2-sum-exp2, then delta.
template <int kRows, int kThreads>
__device__ __forceinline__ void load_statistics(float* smem, const float* lse, const float* delta,
                                                int64_t stride, int begin, int count) {
  for (int i = threadIdx.x; i < kRows; i += kThreads) {
    const bool valid = begin + i < count;
    smem[i] = valid ? log2_sum(lse[(begin + i) * stride]) : kInf;
    smem[kRows + i] = valid ? delta[(begin + i) * stride] : 0.0f;
  }
}

// Destination rows of a result (tokens, heads, D), and the factor applied to it.
struct GradientRows {
  scalar_t* first;
  int64_t stride;
  int count;
  int head_dim;
  float factor;

  __device__ __forceinline__ void pair(int row, int column, float x, float y) const {
    if (row >= count) return;
    single(row, column, x);
    single(row, column + 1, y);
  }
  __device__ __forceinline__ void single(int row, int column, float x) const {
    if (row < count && column < head_dim)
      first[row * stride + column] = from_float<scalar_t>(x * factor);
  }
};
