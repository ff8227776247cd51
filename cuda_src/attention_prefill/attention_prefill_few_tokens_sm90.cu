// attention_prefill_sm90 for up to 16 rows of a sequence, such as single tokens, in launches with
// at most as many (sequence, key/value head) pairs as multiprocessors:
//
//   out = softmax(cap(scale * Q K^T) + mask) V        for every sequence b and query head h
//
// Arguments: AttentionPrefillFewTokensSm90Params, below.
//
// Numerics: see attention_prefill.cu. The results have the bits of attention_prefill_sm90 with one
// split.
// Parallelisation: a CTA, or two or four with some columns of V each, per pair. Of its warps some
// load, some compute P of different key tiles, and some add up O
// (attention_prefill_few_tokens_warps_sm90.cuh). No patterns, no quantized pages. With NEW_TOKEN it
// serves attention_decode with `deterministic`, and first runs qk_norm_rope_store on the newest
// token of each sequence (attention_prefill_new_token_sm90.cuh).
// Mirror: engine/reference/attention_prefill.py, engine/reference/attention_decode.py
#include "attention_prefill/attention_prefill_few_tokens_warps_sm90.cuh"

static_assert(FewTokensMemory::kFixedBytes == FIXED_BYTES,
              "kernels/attention_prefill/few_tokens.py computes another size");

// Strides are in elements: _t between tokens, _h between heads.
struct AttentionPrefillFewTokensSm90Params {
  TensorMap q_map;  // for this and the fields up to `lse` see AttentionPrefillSm90Params
  TensorMap k_map;
  TensorMap v_map;  // TMA box: value_chunk columns
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const int* block_tables;
  const int* context_lens;
  const float* sinks;
  scalar_t* out;
  float* lse;
  int64_t table_stride, out_stride_t, out_stride_h;
  int64_t max_keys;
  int total_q, num_heads, num_kv_heads;
  int group;      // H / K
  int value_dim;  // V
  // For the fields up to num_pairs see Problem.
  int tile_tokens, q_bytes, box_keys, block_shift, num_blocks, page_rows, head_rows, token_rows;
  int num_pairs;
  int stages, value_columns, value_chunk;  // see Cta
  int causal;
  int window;    // 0: no window
  int is_early;  // no kernel that still runs writes lengths, tables or older keys
  float score_inner, score_factor;  // ScoreRule
  // With NEW_TOKEN, which does not use q_map: see NewTokens.
  const scalar_t* new_q;
  scalar_t *k_pages, *v_pages;
  int64_t q_stride_b, q_stride_h;
  int row_elements;
  const scalar_t *new_k, *new_v;
  const int* positions;
  const float* cos_sin;
  const int64_t* slot_mapping;
  const scalar_t *q_weight, *k_weight;
  int64_t k_stride_b, k_stride_h, v_stride_b, v_stride_h;
  int num_positions;
  float eps, weight_offset;
};

__device__ __forceinline__ NewTokens new_tokens_of(const AttentionPrefillFewTokensSm90Params& p) {
  return {p.new_q,        p.new_k,         p.new_v,        p.positions,  p.cos_sin,
          p.slot_mapping, p.q_weight,      p.k_weight,     p.k_pages,    p.v_pages,
          p.q_stride_b,   p.q_stride_h,    p.k_stride_b,   p.k_stride_h, p.v_stride_b,
          p.v_stride_h,   p.num_positions, p.row_elements, p.eps,        p.weight_offset};
}

__device__ __forceinline__ Problem make_problem(const AttentionPrefillFewTokensSm90Params& p) {
  return {p.cu_seqlens_q,
          p.cu_seqlens_k,
          p.block_tables,
          p.context_lens,
          nullptr,
          p.table_stride,
          p.max_keys,
          p.total_q,
          p.group,
          p.num_kv_heads,
          p.tile_tokens,
          p.q_bytes,
          p.box_keys,
          p.block_shift,
          p.num_blocks,
          p.page_rows,
          p.head_rows,
          p.token_rows,
          p.num_pairs,
          p.num_pairs,
          1,
          1,
          p.tile_tokens,
          p.num_pairs,
          1,
          p.causal,
          p.window > 0 ? static_cast<unsigned>(p.window) : 1u << 31,
          Pattern{}};
}

template <bool kSoftcap>
__device__ __forceinline__ void prefill(const AttentionPrefillFewTokensSm90Params& p,
                                        unsigned char* smem_bytes) {
  pdl_trigger();
  const int chunks = (p.value_columns + p.value_chunk - 1) / p.value_chunk;
  const int value_bytes = chunks * p.value_chunk * 2 * kKeys;
  const FewTokensMemory smem(smem_bytes, p.stages, value_bytes);
  const Problem problem = make_problem(p);
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.q_map);
    tma_prefetch_map(&p.k_map);
    tma_prefetch_map(&p.v_map);
  }
  smem.init(p.value_columns / kColumns);
  smem.init_queries(problem);
  __syncthreads();
  if (!p.is_early) pdl_wait();
  WorkTile tile;
  if (!find_work_tile<kKeys>(problem, blockIdx.y, tile)) {
    pdl_wait();  // a later kernel's wait must also cover the kernels before this one
    return;
  }
  int new_tile = p.causal ? ::max(tile.last_key_of_first_token, 0) / kKeys : 0;
  if (kNewToken) new_tile = tile.end;  // the new row of the last tile is written below
  const int first_column = blockIdx.x * p.value_columns;
  const Cta cta{smem,          problem,    tile,         tile.end - tile.begin,
                new_tile,      p.stages,   first_column, p.value_columns,
                p.value_chunk, value_bytes};
  const int warp_idx = __shfl_sync(~0u, threadIdx.x / 32, 0);
  constexpr int kFirstScoreWarp = 2 * kLoaders, kFirstValueWarp = kFirstScoreWarp + kScoreWarps;
  if (warp_idx < kLoaders) {
    load_queries_and_keys(cta, warp_idx, &p.q_map, &p.k_map);
  } else if (warp_idx < kFirstScoreWarp) {
    load_values(cta, warp_idx - kLoaders, &p.v_map);
  } else if (warp_idx < kFirstValueWarp) {
    const ScoreRule rule{p.score_inner, p.score_factor};
    ScoreWarp<kSoftcap>(cta, rule).run(warp_idx - kFirstScoreWarp);
  } else {
    const Epilogue epilogue{problem,        p.sinks,        p.out,       p.lse,       nullptr,
                            p.out_stride_t, p.out_stride_h, p.num_heads, p.value_dim, nullptr};
    ValueWarp(cta, warp_idx - kFirstValueWarp).run(epilogue, new_tokens_of(p));
  }
}

#define ENGINE_PREFILL_FEW_TOKENS(name, softcap)                            \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)              \
      name(const __grid_constant__ AttentionPrefillFewTokensSm90Params p) { \
    extern __shared__ __align__(128) unsigned char smem_bytes[];            \
    prefill<softcap>(p, smem_bytes);                                        \
  }
ENGINE_PREFILL_FEW_TOKENS(attention_prefill_few_tokens_sm90, false)
ENGINE_PREFILL_FEW_TOKENS(attention_prefill_few_tokens_sm90_softcap, true)
