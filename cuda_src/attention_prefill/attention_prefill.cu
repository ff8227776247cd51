// Flash attention over whole sequences, or chunks of them, of any lengths in one launch.
//
//   out = softmax(cap(scale * Q K^T) + mask) V        for every sequence b and query head h
//
//   q            (Tq, H, D)  scalar_t   sequence b: rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
//   k, v         (Tk, K, D)  scalar_t   dense: rows cu_seqlens_k[b] to cu_seqlens_k[b + 1]
//             or (P, K, block_size, D)  pages: token j in page block_tables[b, j / block_size]
//   cu_seqlens_q (B+1,) int32           cu_seqlens_k (B+1,) int32, or null with pages
//   block_tables (B, NB) int32, or null; read only where context_lens says that there are keys
//   context_lens (B,) int32, or null    keys of each sequence in pages
//   out          (Tq, H, D)  scalar_t   lse (Tq, H) float, contiguous, or null
//   *_stride_t, *_stride_h              elements from token to token and from head to head
//
// Query i of n sees keys 0 to len - n + i (causal) or all; with a window its last `window` ones.
// Compiled with PATTERN: of these, the ones of a pattern (common/attention_pattern.cuh).
//
// Numerics: scores, softmax, sums and O in float; P is rounded to scalar_t for P V (its sum is
// not); out is rounded once. Float inputs never meet a tensor core, so nothing becomes TF32.
// Parallelisation: a block takes kRows rows (token, head of the group) of one sequence and
// key/value head, and walks over the keys that these see; the blocks with most keys start first.
// Mirror: engine/reference/attention_prefill.py
#if ENGINE_DTYPE == 0
#include "common/attention_simt.cuh"
using Core = SimtAttention<HEAD_DIM, WARPS_M, ROW_TILES>;
#else
#include "common/attention_mma.cuh"
using Core = MmaAttention<HEAD_DIM, WARPS_M, 1, ROW_TILES, TILE_KEYS, STAGES>;
#endif
#if PATTERN
#define ENGINE_PATTERN_PARAMS                                                                \
  , const unsigned *pattern_blocks, int pattern_words, int pattern_num_q, int pattern_num_k, \
      int pattern_q, int pattern_k, int pattern_offset
#else
#define ENGINE_PATTERN_PARAMS
#endif
static_assert(Core::kSharedBytes == SHARED_BYTES, "kernels/_attention.py computes another size");

extern "C" __global__ void __launch_bounds__(Core::kThreads, 1)
    attention_prefill(const scalar_t* q, const scalar_t* k, const scalar_t* v,
                      const int* cu_seqlens_q, const int* cu_seqlens_k, const int* block_tables,
                      const int* context_lens, scalar_t* out, float* lse, int64_t q_stride_t,
                      int64_t q_stride_h, int64_t k_stride_t, int64_t k_stride_h,
                      int64_t v_stride_t, int64_t v_stride_h, int64_t page_stride,
                      int64_t table_stride, int64_t out_stride_t, int64_t out_stride_h,
                      int64_t max_keys, int total_q, int num_heads, int group, int head_dim,
                      int block_shift, int num_blocks, int causal, int window, int is_vector,
                      float score_inner, float score_factor ENGINE_PATTERN_PARAMS) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  scalar_t* const smem = reinterpret_cast<scalar_t*>(smem_bytes);
  const int b = blockIdx.z, kv_head = blockIdx.y;
  const int row_begin = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Core::kRows;

  // SAFETY: lengths that do not fit the arrays are cut to them.
  const int q_begin = min(max(cu_seqlens_q[b], 0), total_q);
  const int num_tokens = min(max(cu_seqlens_q[b + 1], q_begin), total_q) - q_begin;
  int64_t k_begin = 0, num_keys;
  if (block_tables != nullptr) {
    num_keys = min(static_cast<int64_t>(max(context_lens[b], 0)), max_keys);
  } else {
    k_begin = min(static_cast<int64_t>(max(cu_seqlens_k[b], 0)), max_keys);
    num_keys = min(max(static_cast<int64_t>(cu_seqlens_k[b + 1]), k_begin), max_keys) - k_begin;
  }
  RowRule rows(num_tokens, group, static_cast<int>(num_keys), causal != 0, window);
#if PATTERN
  rows.pattern = Pattern{pattern_blocks, pattern_words, pattern_num_q, pattern_num_k,
                         pattern_q,      pattern_k,     pattern_offset};
  rows.first_position = causal ? static_cast<int>(num_keys) - num_tokens : 0;
#endif
  if (row_begin >= rows.count) return;

  const int head = kv_head * group;
  const Queries queries{q + q_begin * q_stride_t + head * q_stride_h, q_stride_t, q_stride_h,
                        head_dim, is_vector != 0};
  const KeyValues kv{k + k_begin * k_stride_t + kv_head * k_stride_h,
                     v + k_begin * v_stride_t + kv_head * v_stride_h,
                     block_tables == nullptr ? nullptr : block_tables + b * table_stride,
                     k_stride_t,
                     v_stride_t,
                     page_stride,
                     block_shift,
                     num_blocks,
                     head_dim,
                     is_vector != 0};
  const int last_row = min(row_begin + Core::kRows, rows.count) - 1;
  const int begin = rows.first_key(row_begin);
  const int end = min(rows.last_key(last_row) + 1, static_cast<int>(num_keys));

  Core core;
  core.run(smem, queries, kv, rows, ScoreRule{score_inner, score_factor}, row_begin, begin, end);
  const int64_t lse_begin = static_cast<int64_t>(q_begin) * num_heads + head;
  core.finish(smem, rows, row_begin,
              Output{out + q_begin * out_stride_t + head * out_stride_h, out_stride_t, out_stride_h,
                     lse == nullptr ? nullptr : lse + lse_begin, num_heads, group, head_dim,
                     is_vector != 0});
}
