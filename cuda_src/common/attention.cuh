// Shared by all attention kernels: masking, K/V addressing, tile loads to shared memory and result
// stores.
//
// Query heads that share a key/value head are packed: row = token * group + head (group = H / K).
// One key tile then serves the whole group, and even short queries fill a row tile.
#pragma once

#include "common/cp_async.cuh"
#include "common/exp2.cuh"
#include "common/page_codes.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr float kInf = __builtin_bit_cast(float, 0x7f800000);

// Hides the origin of x from the compiler, which then recomputes derived values here instead of
// keeping them in registers across a loop that has none to spare.
__device__ __forceinline__ int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Subtracting a base of -inf would yield NaN, so a row that has seen no key yet subtracts 0.
__device__ __forceinline__ float finite_or_zero(float max) { return max == -kInf ? 0.0f : max; }

// Adds an attention sink to a row's softmax: one extra logit with no value vector. `sink` and
// `base` are in log2 units, and `sum` is relative to 2^base (-inf: no key). On return both include
// the sink, and the caller must multiply O by the returned factor. The larger of sink and base
// becomes the new base, so nothing overflows.
__device__ __forceinline__ float add_sink(float sink, float& base, float& sum) {
  const float high = fmaxf(base, sink);
  const float rescale = exp2_approx(base - finite_or_zero(high));
  sum = fmaf(sum, rescale, exp2_approx(sink - finite_or_zero(high)));
  base = high;
  return rescale;
}

// Turns q.k into a score in log2 units; with softcap c the score is c * tanh(scale * q.k / c). The
// host computes both factors, so kernels read them from constant memory and need no registers.
struct ScoreRule {
  float inner;   // scale / softcap, the factor inside tanh; 0: no softcap
  float factor;  // (softcap or, without one, scale) * log2(e)

  // The rule for quantized keys, whose dot products must be multiplied by `key_scale`.
  __device__ __forceinline__ ScoreRule scaled(float key_scale) const {
    if (inner != 0.0f) return ScoreRule{inner * key_scale, factor};
    return ScoreRule{inner, factor * key_scale};
  }

  __device__ __forceinline__ float cap(float dot) const {
    if constexpr (sizeof(scalar_t) == 4) return tanhf(inner * dot);
    // tanh with an absolute error of 3e-7
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2.0f * kLog2E * inner * dot));
  }
};

// The query rows of one sequence and key/value head, and which keys each row sees.
struct RowRule {
  int count;                    // number of rows: tokens * group
  int group;                    // query heads per key/value head
  int last_key_of_first_token;  // negative: that token sees no key
  int causal;      // 1: each token sees one key more than the previous; 0: all see the same keys
  unsigned reach;  // number of keys a row sees, up to its last key: 2^31 without a limit
  const uint64_t* tree = nullptr;  // bit mask of the new tokens each token sees; null: causal
  int earlier = 0;                 // number of mask bits for tokens before token 0

  // `window`: number of keys a row sees; 0 means no limit. A negative one is for a single token: it
  // sees the keys of its own chunk of -window keys, a power of two.
  __device__ __forceinline__ RowRule(int num_tokens, int group, int num_keys, bool causal,
                                     int window)
      : count(num_tokens * group),
        group(group),
        last_key_of_first_token(causal ? num_keys - num_tokens : num_keys - 1),
        causal(causal),
        reach(window > 0 ? static_cast<unsigned>(window) : 1u << 31) {
#if !PAGE_CODES  // codes have no chunks
    if (window < 0) reach = static_cast<unsigned>(((num_keys - 1) & ~window) + 1);
#endif
  }

  __device__ __forceinline__ int last_key(int row) const {
    return last_key_of_first_token + (causal ? row / group : 0);
  }
  __device__ __forceinline__ int first_key(int row) const {
    return reach < 1u << 31 ? max(0, last_key(row) - static_cast<int>(reach) + 1) : 0;
  }
  // Hooks that PatternRowRule overrides: in_pattern tells whether the pattern lets a row see a key,
  // skips whether it hides `keys` keys from all of rows [first, last].
  static constexpr bool kHasPattern = false;
  __device__ __forceinline__ bool in_pattern(int, int) const { return true; }
  __device__ __forceinline__ bool skips(int, int, int, int) const { return false; }
  // One unsigned comparison checks both bounds: a negative difference wraps to a huge value.
  __device__ __forceinline__ bool sees(int last_key, int key) const {
    return static_cast<unsigned>(last_key - key) < reach;
  }
  // Also applies the tree mask of the new tokens. `last_key` is the last key of row `row`.
  __device__ __forceinline__ bool sees(int row, int last_key, int key) const {
    const int token = key - last_key_of_first_token + earlier;
    if (tree != nullptr && token >= 0 && last_key >= key)
      return (tree[min(row, count - 1) / group] >> token & 1) != 0;
    return sees(last_key, key);
  }
  // The last key up to which this row and all later rows see every key, ignoring the window.
  __device__ __forceinline__ int last_common_key(int row) const {
    if (tree != nullptr) return last_key_of_first_token - earlier - 1;
    return last_key(row);
  }
};

// SAFETY: an id outside the cache is clamped, so a damaged table cannot cause reads outside it.
__device__ __forceinline__ unsigned clamped_page(int id, int num_blocks) {
  return min(static_cast<unsigned>(id), static_cast<unsigned>(num_blocks - 1));
}

// Keys and values of one sequence and key/value head: dense (null table) or paged.
struct KeyValues {
  const page_t* k;  // this head's first row; if dense, that row of the sequence's first token
  const page_t* v;
  const int* table;  // the sequence's row of the block table
  int64_t k_token_stride, v_token_stride, page_stride;
  int block_shift;  // log2(block_size)
  int num_blocks;
  int head_dim;
  int value_dim;   // columns of v, at most head_dim
  bool is_vector;  // every row consists of whole, aligned 16-byte words

  __device__ __forceinline__ int64_t page_offset(int key) const {
    return static_cast<int64_t>(clamped_page(table[key >> block_shift], num_blocks)) * page_stride;
  }
};

// Shared-memory layout of a tile with kHeadDim columns, in 16-byte words. 16-bit rows are swizzled:
// the eight rows that one ldmatrix reads must hit eight different bank groups, yet their pitch is a
// multiple of 128 bytes (or an odd multiple of 64, whose rows alternate between two halves of the
// banks anyway). Float rows are padded by one word for the same reason.
template <int kHeadDim>
struct TileLayout {
  static constexpr int kWords = kHeadDim / kVec;
  static constexpr int kPitch = sizeof(scalar_t) == 2 ? kHeadDim : kHeadDim + kVec;
  static_assert(sizeof(scalar_t) == 4 || kWords % 4 == 0, "a row of 64 bytes or a multiple");

  __device__ static __forceinline__ int swizzle(int row) {
    if constexpr (sizeof(scalar_t) == 4) return 0;
    return kWords % 8 == 0 ? row & 7 : (row >> 1) & 3;
  }
  __device__ static __forceinline__ int offset(int row, int word) {
    return row * kPitch + (word ^ swizzle(row)) * kVec;
  }
};

// Copies one 16-byte word of a row of head_dim values. Values past the row's end become zero; if
// !valid, the whole word does.
template <bool kIsVector>
__device__ __forceinline__ void load_word(scalar_t* smem, const scalar_t* row, int word,
                                          int head_dim, bool valid) {
  const int column = word * kVec;
  if constexpr (kIsVector) {
    valid = valid && column < head_dim;
    cp_async_16(smem, valid ? row + column : row, valid);
  } else {
    Vec<scalar_t, kVec> x;
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      x.v[i] = valid && column + i < head_dim ? row[column + i] : from_float<scalar_t>(0.0f);
    store_vec(smem, x);
  }
}

#if PAGE_CODES
// Overload for quantized rows: codes are converted to scalar_t but not multiplied by their scale.
template <bool kIsVector>
__device__ __forceinline__ void load_word(scalar_t* smem, const page_t* row, int word, int head_dim,
                                          bool valid) {
  const int column = word * kVec;
  Vec<page_t, kVec> codes{};
  if constexpr (kIsVector) {
    if (valid && column < head_dim) codes = load_vec<page_t, kVec>(row + column);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (valid && column + i < head_dim) codes.v[i] = row[column + i];
  }
  store_vec(smem, codes_to_scalars(codes));
}
#endif

// kParts: 1 copies K, 2 copies V, 3 both.
template <int kHeadDim, int kKeys, int kThreads, bool kIsVector, int kParts>
__device__ __forceinline__ void load_tile_words(scalar_t* smem_k, scalar_t* smem_v,
                                                const KeyValues& kv, int first_key, int begin,
                                                int end) {
  using Layout = TileLayout<kHeadDim>;
  static_assert(kKeys * Layout::kWords % kThreads == 0, "every thread copies as many words");
  const int thread = recomputed(threadIdx.x);
#pragma unroll(kIsVector ? 4 : 1)
  for (int step = 0; step < kKeys * Layout::kWords / kThreads; ++step) {
    const int i = step * kThreads + thread;
    const int row = i / Layout::kWords, word = i % Layout::kWords;
    const int key = first_key + row;
    const bool valid = key >= begin && key < end;
    int64_t k_offset = 0, v_offset = 0;
    if (valid) {
      int token = key;
      if (kv.table != nullptr) {
        k_offset = v_offset = kv.page_offset(key);
        token = key & ((1 << kv.block_shift) - 1);
      }
      k_offset += token * kv.k_token_stride;
      v_offset += token * kv.v_token_stride;
    }
    const int offset = Layout::offset(row, word);
    if constexpr ((kParts & 1) != 0)
      load_word<kIsVector>(smem_k + offset, kv.k + k_offset, word, kv.head_dim, valid);
    if constexpr ((kParts & 2) != 0)
      load_word<kIsVector>(smem_v + offset, kv.v + v_offset, word, kv.value_dim, valid);
  }
}

// Starts copying keys and values [first_key, first_key + kKeys) to smem_k and smem_v. Keys outside
// [begin, end) are not read but filled with zeros: they may hold NaN, and 0 * NaN would reach the
// sum. kParts: see load_tile_words.
template <int kHeadDim, int kKeys, int kThreads, int kParts = 3>
__device__ __forceinline__ void load_tile(scalar_t* smem_k, scalar_t* smem_v, const KeyValues& kv,
                                          int first_key, int begin, int end) {
  if (kv.is_vector)
    load_tile_words<kHeadDim, kKeys, kThreads, true, kParts>(smem_k, smem_v, kv, first_key, begin,
                                                             end);
  else
    load_tile_words<kHeadDim, kKeys, kThreads, false, kParts>(smem_k, smem_v, kv, first_key, begin,
                                                              end);
}

// The query rows of one sequence and key/value head.
struct Queries {
  const scalar_t* q;  // first token, first head of the group
  int64_t token_stride, head_stride;
  int head_dim;
  bool is_vector;
};

// Starts copying query rows [row_begin, row_begin + kRows) to smem_q, with zeros past the last row.
template <int kHeadDim, int kRows, int kThreads>
__device__ __forceinline__ void load_queries(scalar_t* smem_q, const Queries& queries,
                                             const RowRule& rows, int row_begin) {
  using Layout = TileLayout<kHeadDim>;
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * Layout::kWords; i += kThreads) {
    const int row = row_begin + i / Layout::kWords, word = i % Layout::kWords;
    const bool valid = row < rows.count;
    const int64_t offset =
        valid ? row / rows.group * queries.token_stride + row % rows.group * queries.head_stride
              : 0;
    scalar_t* const target = smem_q + Layout::offset(i / Layout::kWords, word);
    if (queries.is_vector)
      load_word<true>(target, queries.q + offset, word, queries.head_dim, valid);
    else
      load_word<false>(target, queries.q + offset, word, queries.head_dim, valid);
  }
}

// Writes finished rows: out = o / sum and, if requested, lse = ln(sum 2^base), both including the
// head's sink. For each row, with o = sum of P V, a core calls row() once, multiplies o by
// factor(), gets the row's address from at(), and calls pair() or single() for all kHeadDim
// columns.
struct Output {
  scalar_t* out;  // first token, first head of the group
  int64_t token_stride, head_stride;
  float* lse;          // log-sum-exp of the same rows, contiguous (tokens, H); or null
  const float* sinks;  // attention sinks of the group's heads, or null
  int num_heads;
  int group;
  int head_dim;
  bool is_vector;            // pair() may be used
  float value_scale = 1.0f;  // scale of quantized values, applied to o
  // In place of `out`, contiguous: codes (tokens, H, head_dim) and their scales (tokens, H).
  unsigned char* codes = nullptr;
  float* scales = nullptr;

  static constexpr bool kIsResult = true;  // not a partial

  __device__ __forceinline__ void row(int row, float base, float sum) const {
    if (lse == nullptr) return;
    if (sinks != nullptr) add_sink(sinks[row % group] * kLog2E, base, sum);
    const int64_t index = static_cast<int64_t>(row / group) * num_heads + row % group;
    lse[index] = sum == 0.0f ? -kInf : (base + log2f(sum)) * kLn2;
  }
  __device__ __forceinline__ float factor(int row, float base, float sum) const {
    float rescale = 1.0f;
    if (sinks != nullptr) rescale = add_sink(sinks[row % group] * kLog2E, base, sum);
    if constexpr (kHasCodes) rescale *= value_scale;
    return sum == 0.0f ? 0.0f : rescale * (1.0f / sum);
  }
  // The row's place in `scales`.
  __device__ __forceinline__ int64_t scale_index(int row) const {
    return static_cast<int64_t>(row / group) * num_heads + row % group;
  }
  __device__ __forceinline__ scalar_t* at(int row) const {
    return out + row / group * token_stride + row % group * head_stride;
  }
  __device__ __forceinline__ void pair(scalar_t* row, int column, float x, float y) const {
    if (column < head_dim)
      store_vec(row + column, Vec<scalar_t, 2>{from_float<scalar_t>(x), from_float<scalar_t>(y)});
  }
  __device__ __forceinline__ void single(scalar_t* row, int column, float x) const {
    if (column < head_dim) row[column] = from_float<scalar_t>(x);
  }
};
