// Flash attention over whole sequences or chunks of them, with any mix of lengths in one launch.
//
//   out = softmax(cap(scale * Q K^T) + mask) V        for every sequence b and query head h
//
// Query i of n sees keys 0 to len - n + i if causal, otherwise all keys; with a window, only the
// last `window` of them. Compiled with PATTERN, it sees only those that a pattern allows
// (attention_pattern.cuh). A sink adds exp(sink) to the softmax denominator of its head's
// rows.
//
// Arguments: AttentionPrefillParams, below.
// Macros: the attributes of Tile in engine/kernels/_attention.py; ENGINE_DTYPE 0 is float32.
//
// Numerics: scores, softmax, sums and O are in float; P is rounded to scalar_t for P V, but its sum
// uses the unrounded P; out is rounded once. Float inputs never use tensor cores, so nothing is
// rounded to TF32.
// Parallelisation: a CTA processes kRows rows (token, head of the group) of one sequence and
// key/value head, and loops over the keys that they see. The CTAs with the most keys start first.
// Mirror: engine/reference/attention_prefill.py
#include "attention_prefill/attention_prefill_pattern_rows.cuh"
#if ENGINE_DTYPE == 0
#include "common/attention_simt.cuh"
using Core = SimtAttention<HEAD_DIM, WARPS_M, ROW_TILES>;
#else
#include "common/attention_mma.cuh"
using Core = MmaAttention<HEAD_DIM, WARPS_M, 1, ROW_TILES, TILE_KEYS, STAGES, COLUMN_WARPS>;
#endif
static_assert(Core::kSharedBytes == SHARED_BYTES, "kernels/_attention.py computes another size");

// Minimum number of CTAs per SM, which caps the registers: four in float32, which needs at most 128
// registers per thread.
constexpr int kMinBlocks = ENGINE_DTYPE == 0 && HEAD_DIM <= 128 ? 4 : 1;

// Strides are in elements: _t between tokens, _h between heads.
struct AttentionPrefillParams {
  const scalar_t* q;        // (Tq, H, D)
  const page_t* k;          // (Tk, K, D) dense, or (P, K, block_size, D) pages
  const page_t* v;          // (Tk, K, V) dense, V <= D; or pages like k's, with equal strides
  const int* cu_seqlens_q;  // (B + 1,) sequence b's queries: rows cu_seqlens_q[b] to [b + 1]
  const int* cu_seqlens_k;  // (B + 1,) likewise for its keys; null if paged
  const int* block_tables;  // (B, NB) token j is in page block_tables[b, j / block_size]; or null
  const int* context_lens;  // (B,) number of keys per sequence; null if dense
  const float* sinks;       // (H,) extra logit of each row's softmax; or null
  scalar_t* out;            // (Tq, H, V)
  float* lse;               // (Tq, H) contiguous, or null
  int64_t q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h;
  int64_t page_stride, table_stride, out_stride_t, out_stride_h;
  int64_t max_keys;  // dense: Tk; paged: NB * block_size
  int total_q, num_heads;
  int group;                    // H / K
  int head_dim, value_dim;      // D, V
  int block_shift, num_blocks;  // log2(block_size), P
  int causal;
  int window;                       // 0: no window
  int is_vector;                    // all rows consist of whole, aligned 16-byte words
  float score_inner, score_factor;  // ScoreRule
  // See attention_pattern.cuh; zeros without a pattern.
  const unsigned* pattern_blocks;
  int pattern_words, pattern_num_q, pattern_num_k, pattern_q, pattern_k, pattern_offset;
  const float *k_scale, *v_scale;  // (K,) scales of quantized pages, or null
};

// Rows of one sequence's queries and keys in the arrays.
struct SequenceRows {
  int q_begin, num_tokens;
  int64_t k_begin, num_keys;

  // SAFETY: offsets and lengths are clamped to the arrays' sizes.
  __device__ __forceinline__ SequenceRows(const AttentionPrefillParams& p, int b) : k_begin(0) {
    q_begin = min(max(p.cu_seqlens_q[b], 0), p.total_q);
    num_tokens = min(max(p.cu_seqlens_q[b + 1], q_begin), p.total_q) - q_begin;
    if (p.block_tables != nullptr) {
      num_keys = min(static_cast<int64_t>(max(p.context_lens[b], 0)), p.max_keys);
    } else {
      k_begin = min(static_cast<int64_t>(max(p.cu_seqlens_k[b], 0)), p.max_keys);
      num_keys =
          min(max(static_cast<int64_t>(p.cu_seqlens_k[b + 1]), k_begin), p.max_keys) - k_begin;
    }
  }
};

extern "C" __global__ void __launch_bounds__(Core::kThreads, kMinBlocks)
    attention_prefill(const __grid_constant__ AttentionPrefillParams p) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  scalar_t* const smem = reinterpret_cast<scalar_t*>(smem_bytes);
  const int b = blockIdx.z, kv_head = blockIdx.y, head = kv_head * p.group;
  const int row_begin = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Core::kRows;
  const SequenceRows sequence(p, b);
  const int num_keys = static_cast<int>(sequence.num_keys);
  const auto rows = make_rows<PATTERN != 0>(p, sequence.num_tokens, num_keys);
  if (row_begin >= rows.count) return;

  const int64_t q_begin = sequence.q_begin;
  const Queries queries{p.q + q_begin * p.q_stride_t + head * p.q_stride_h, p.q_stride_t,
                        p.q_stride_h, p.head_dim, p.is_vector != 0};
  const KeyValues kv{p.k + sequence.k_begin * p.k_stride_t + kv_head * p.k_stride_h,
                     p.v + sequence.k_begin * p.v_stride_t + kv_head * p.v_stride_h,
                     p.block_tables == nullptr ? nullptr : p.block_tables + b * p.table_stride,
                     p.k_stride_t,
                     p.v_stride_t,
                     p.page_stride,
                     p.block_shift,
                     p.num_blocks,
                     p.head_dim,
                     p.value_dim,
                     p.is_vector != 0};
  const int last_row = min(row_begin + Core::kRows, rows.count) - 1;
  const int begin = rows.first_key(row_begin);
  const int end = min(rows.last_key(last_row) + 1, num_keys);

  ScoreRule rule{p.score_inner, p.score_factor};
  if constexpr (kHasCodes) rule = rule.scaled(p.k_scale[kv_head]);
  Core core;
  core.run(smem, queries, kv, rows, rule, row_begin, begin, end);
  core.finish(
      smem, rows, row_begin,
      Output{p.out + q_begin * p.out_stride_t + head * p.out_stride_h, p.out_stride_t,
             p.out_stride_h, p.lse == nullptr ? nullptr : p.lse + q_begin * p.num_heads + head,
             p.sinks == nullptr ? nullptr : p.sinks + head, p.num_heads, p.group, p.value_dim,
             p.is_vector != 0, kHasCodes ? p.v_scale[kv_head] : 1.0f});
}
