// Shared by all attention kernels: the mask, the addresses of keys and values, the loads of their
// tiles to shared memory, and the stores of results.
//
// Query heads that share a key/value head are packed: row = token * group + head (group = H / K),
// so one tile of keys serves the whole group, and short queries still fill a tile of rows.
#pragma once

#include "common/cp_async.cuh"
#include "common/page_codes.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInf = __builtin_bit_cast(float, 0x7f800000);

// 2^x; 2^-inf = 0. Relative error 2e-7.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Hides the origin of x from the compiler: values derived from it are recomputed here, instead of
// occupying registers throughout a loop that has none to spare.
__device__ __forceinline__ int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Subtracting a base of -inf would yield NaN: a row without any key so far subtracts 0.
__device__ __forceinline__ float finite_or_zero(float max) { return max == -kInf ? 0.0f : max; }

// Adds an attention sink to a row's softmax: one more logit, without a value. `sink` and `base` are
// in units of log2, and `sum` is relative to 2^base (-inf: no key). Afterwards both include the
// sink, and O must be multiplied by the result. The larger one becomes the base, so nothing
// overflows.
__device__ __forceinline__ float add_sink(float sink, float& base, float& sum) {
  const float high = fmaxf(base, sink);
  const float rescale = exp2_approx(base - finite_or_zero(high));
  sum = sum * rescale + exp2_approx(sink - finite_or_zero(high));
  base = high;
  return rescale;
}

// Turns q.k into a score in units of log2: with softcap c, c * tanh(scale * q.k / c). The factors
// are computed on the host, so that kernels read them from constant memory instead of holding them
// in registers.
struct ScoreRule {
  float inner;   // scale / softcap: tanh(inner * q.k) comes first; 0: no softcap
  float factor;  // scale or softcap, times log2(e)

  // The rule for quantized keys with scale `key_scale`.
  __device__ __forceinline__ ScoreRule scaled(float key_scale) const {
    if (inner != 0.0f) return ScoreRule{inner * key_scale, factor};
    return ScoreRule{inner, factor * key_scale};
  }

  __device__ __forceinline__ float cap(float dot) const {
    if constexpr (sizeof(scalar_t) == 4) return tanhf(inner * dot);
    // tanh, to 3e-7 absolute
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2.0f * kLog2E * inner * dot));
  }
};

// The query rows of one sequence and key/value head, and the keys they see.
struct RowRule {
  int count;                    // rows: tokens * group
  int group;                    // query heads per key/value head
  int last_key_of_first_token;  // negative: it sees no key
  int causal;      // 1: each further token sees one more key; 0: all tokens see the same keys
  unsigned reach;  // keys a row sees, counted back from its last one: window, or 2^31
  const uint64_t* tree = nullptr;  // new tokens that each token sees, as masks; null: causal
  int earlier = 0;                 // tokens before token 0 with bits in the masks

  __device__ __forceinline__ RowRule(int num_tokens, int group, int num_keys, bool causal,
                                     int window)
      : count(num_tokens * group),
        group(group),
        last_key_of_first_token(causal ? num_keys - num_tokens : num_keys - 1),
        causal(causal),
        reach(window > 0 ? static_cast<unsigned>(window) : 1u << 31) {}

  __device__ __forceinline__ int last_key(int row) const {
    return last_key_of_first_token + (causal ? row / group : 0);
  }
  __device__ __forceinline__ int first_key(int row) const {
    return reach < 1u << 31 ? max(0, last_key(row) - static_cast<int>(reach) + 1) : 0;
  }
  // True in PatternRowRule: whether a pattern lets a row see a key, and hides `keys` keys from rows
  // [first, last].
  static constexpr bool kHasPattern = false;
  __device__ __forceinline__ bool in_pattern(int, int) const { return true; }
  __device__ __forceinline__ bool skips(int, int, int, int) const { return false; }
  // One unsigned comparison covers both bounds: a negative difference becomes huge.
  __device__ __forceinline__ bool sees(int last_key, int key) const {
    return static_cast<unsigned>(last_key - key) < reach;
  }
  // The same for row `row`, whose last key is last_key, including its tree mask of the new tokens.
  __device__ __forceinline__ bool sees(int row, int last_key, int key) const {
    const int token = key - last_key_of_first_token + earlier;
    if (tree != nullptr && token >= 0 && last_key >= key)
      return (tree[min(row, count - 1) / group] >> token & 1) != 0;
    return sees(last_key, key);
  }
  // The last key such that this row and all later ones see every key up to it, the window aside.
  __device__ __forceinline__ int last_common_key(int row) const {
    if (tree != nullptr) return last_key_of_first_token - earlier - 1;
    return last_key(row);
  }
};

// SAFETY: an id outside the cache is clamped, so a damaged table cannot make us read elsewhere.
__device__ __forceinline__ unsigned clamped_page(int id, int num_blocks) {
  return min(static_cast<unsigned>(id), static_cast<unsigned>(num_blocks - 1));
}

// Keys and values of one sequence and one key/value head: dense (table null), or in pages.
struct KeyValues {
  const page_t* k;  // first row of this head; dense: of this sequence's first token
  const page_t* v;
  const int* table;  // the sequence's row of the block table
  int64_t k_token_stride, v_token_stride, page_stride;
  int block_shift;  // log2(block_size)
  int num_blocks;
  int head_dim;
  bool is_vector;  // rows are whole, aligned 16-byte words

  __device__ __forceinline__ int64_t page_offset(int key) const {
    return static_cast<int64_t>(clamped_page(table[key >> block_shift], num_blocks)) * page_stride;
  }
};

// Position of a 16-byte word of a row in a tile of kHeadDim columns. 16-bit rows are swizzled: the
// eight rows that ldmatrix reads together must be in eight different bank groups, but their pitch
// is a multiple of 128 bytes (or of 64, where four words alternate without a swizzle). Float rows
// are padded by one word for the same reason.
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

// Copies one word of a row of head_dim values, with zeros past the row's end, or all zeros if
// !valid.
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
// The same for a row of codes, which are converted to scalar_t but not multiplied by their scale.
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

template <int kHeadDim, int kKeys, int kThreads, bool kIsVector>
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
    load_word<kIsVector>(smem_k + offset, kv.k + k_offset, word, kv.head_dim, valid);
    load_word<kIsVector>(smem_v + offset, kv.v + v_offset, word, kv.head_dim, valid);
  }
}

// Starts the copy of keys and values [first_key, first_key + kKeys) to smem_k and smem_v. Those
// outside [begin, end) become zero and are not read: they may be NaN, and 0 * NaN would reach the
// sum.
template <int kHeadDim, int kKeys, int kThreads>
__device__ __forceinline__ void load_tile(scalar_t* smem_k, scalar_t* smem_v, const KeyValues& kv,
                                          int first_key, int begin, int end) {
  if (kv.is_vector)
    load_tile_words<kHeadDim, kKeys, kThreads, true>(smem_k, smem_v, kv, first_key, begin, end);
  else
    load_tile_words<kHeadDim, kKeys, kThreads, false>(smem_k, smem_v, kv, first_key, begin, end);
}

// The query rows of one sequence and key/value head.
struct Queries {
  const scalar_t* q;  // first token, first head of the group
  int64_t token_stride, head_stride;
  int head_dim;
  bool is_vector;
};

// Starts the copy of query rows [row_begin, row_begin + kRows) to smem_q, zeros past the last row.
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

// A writer of finished rows: out = o / sum, and lse = ln(sum 2^base) if requested, both with the
// head's sink. For each row, with o = sum of P V, a core calls row() once, multiplies o by
// factor(), gets the row's address from at(), and calls pair() or single() for every column of
// kHeadDim.
struct Output {
  scalar_t* out;  // first token, first head of the group
  int64_t token_stride, head_stride;
  float* lse;          // the same row's, contiguous (tokens, H); or null
  const float* sinks;  // sinks of the group's heads, or null
  int num_heads;
  int group;
  int head_dim;
  bool is_vector;            // pair() may be used
  float value_scale = 1.0f;  // factor on o: the scale of quantized values

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
