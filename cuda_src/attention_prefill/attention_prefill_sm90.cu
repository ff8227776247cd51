// Flash attention on Hopper: attention_prefill.cu with wgmma, TMA and warp specialisation.
//
//   out = softmax(cap(scale * Q K^T) + mask) V        for every sequence b and query head h
//
// Arguments: AttentionPrefillSm90Params, below.
//
// Numerics: see attention_prefill.cu. Splits are summed in order. A row's result depends bitwise
// only on its own query and keys, the number of splits, and whether a pattern is in use (which
// changes the key tile size).
// Parallelisation: one persistent CTA per SM, which fetches work tiles
// (attention_prefill_scheduler_sm90.cuh). Of its four producer warps, one loads Q, one loads K and
// V, and two help if pages are small. Each consumer warpgroup owns 64 rows
// (attention_prefill_consumer_sm90.cuh). While one warpgroup computes exponentials, the tensor
// cores work for the others; three warpgroups keep both units busier than two, if registers
// suffice. Compiled with FEW_ROWS, a CTA has one consumer warpgroup for 16 rows
// (attention_prefill_few_consumer_sm90.cuh), and the launch overlaps those before and after it.
// Mirror: engine/reference/attention_prefill.py
#include "attention_prefill/attention_prefill_code_producer_sm90.cuh"
#include "attention_prefill/attention_prefill_epilogue_sm90.cuh"
#include "attention_prefill/attention_prefill_tile_sm90.cuh"
#include "common/pdl.cuh"
#if FEW_ROWS
#include "attention_prefill/attention_prefill_few_consumer_sm90.cuh"
#else
#include "attention_prefill/attention_prefill_consumer_sm90.cuh"
#endif

static_assert(SharedMemory::kBytes == SHARED_BYTES,
              "kernels/attention_prefill/sm90.py computes another size");

// Strides are in elements: _t between tokens, _h between heads.
struct AttentionPrefillSm90Params {
  TensorMap q_map;  // q (Tq, K, H / K, D); TMA box: 64 columns x group x 1 x tile_tokens
  TensorMap k_map;  // k: dense (Tk, K, D), or pages as (page rows, box_keys, D)
  TensorMap v_map;  // v likewise, V columns; TMA box: 64 columns of box_keys keys of one head
  const int* cu_seqlens_q;  // for this and the next three see AttentionPrefillParams
  const int* cu_seqlens_k;
  const int* block_tables;
  const int* context_lens;
  const float* sinks;  // (H,) extra logit of each row's softmax; null if none or splits > 1
  scalar_t* out;       // (Tq, H, V)
  float* lse;          // (Tq, H) contiguous, or null
  float* partial;      // (splits, Tq, H, V), then (splits, Tq, H) log2-sum-exp2; if splits > 1
  int* counter;        // work tiles fetched so far; 0 before and after the launch
  int64_t table_stride, out_stride_t, out_stride_h;
  int64_t max_keys;  // dense: Tk; paged: keys that a row of the table covers
  int total_q, num_heads, num_kv_heads;
  int group;      // H / K
  int value_dim;  // V
  // For the fields below see Problem.
  int tile_tokens, q_bytes, box_keys, block_shift, num_blocks, page_rows, head_rows, token_rows;
  int num_pairs, tiles_of_pair, long_tiles, short_tokens, total, section, splits;
  int causal;
  int window;                       // 0: no window
  float score_inner, score_factor;  // ScoreRule
  // See attention_pattern.cuh; zeros without a pattern.
  const unsigned* pattern_blocks;
  int pattern_words, pattern_num_q, pattern_num_k, pattern_q, pattern_k, pattern_offset;
  const float *k_scale, *v_scale;  // (K,) scales of quantized pages, or null
};

__device__ __forceinline__ Problem make_problem(const AttentionPrefillSm90Params& p) {
  return {p.cu_seqlens_q, p.cu_seqlens_k, p.block_tables,
          p.context_lens, p.counter,      p.table_stride,
          p.max_keys,     p.total_q,      p.group,
          p.num_kv_heads, p.tile_tokens,  p.q_bytes,
          p.box_keys,     p.block_shift,  p.num_blocks,
          p.page_rows,    p.head_rows,    p.token_rows,
          p.num_pairs,    p.section,      p.tiles_of_pair,
          p.long_tiles,   p.short_tokens, p.total,
          p.splits,       p.causal,       p.window > 0 ? static_cast<unsigned>(p.window) : 1u << 31,
          make_pattern(p)};
}

template <bool kSoftcap>
__device__ __forceinline__ void prefill(const AttentionPrefillSm90Params& p,
                                        unsigned char* smem_bytes) {
  if constexpr (kFewRows) pdl_trigger();
  const SharedMemory smem(smem_bytes);
  const Problem problem = make_problem(p);
  if (threadIdx.x == 0) smem.init_barriers(problem);
  smem.init_queries(problem);
  __syncthreads();
  if constexpr (kFewRows) pdl_wait();
  if (threadIdx.x < 128 * kConsumerWarpgroups) {
    warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer<kSoftcap> consumer(smem, problem, ScoreRule{p.score_inner, p.score_factor});
#if PAGE_CODES
    consumer.k_scale = p.k_scale;
    consumer.rule_of_keys = consumer.rule;
#endif
    consumer.run(Epilogue{problem, p.sinks, p.out, p.lse, p.partial, p.out_stride_t, p.out_stride_h,
                          p.num_heads, p.value_dim, p.v_scale});
  } else {
    warpgroup_reg_dealloc<kProducerRegisters>();
    const int warp_idx = threadIdx.x / 32 - 4 * kConsumerWarpgroups;
    const CodeProducer producer{{smem, problem}};
    if (warp_idx == 0)
      producer.load_queries(&p.q_map);
    else if (kHasCodes && warp_idx == 1)
      producer.load_codes(&p.k_map, &p.v_map);
    else if (kHasCodes)
      producer.convert();
    else if (warp_idx == 1)
      producer.load_keys(&p.k_map, &p.v_map);
    else if (has_helpers(problem))
      producer.help(&p.k_map, &p.v_map);
  }
}

#define ENGINE_PREFILL(name, softcap)                                \
  extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) \
      name(const __grid_constant__ AttentionPrefillSm90Params p) {   \
    extern __shared__ __align__(128) unsigned char smem_bytes[];     \
    prefill<softcap>(p, smem_bytes);                                 \
  }
ENGINE_PREFILL(attention_prefill_sm90, false)
ENGINE_PREFILL(attention_prefill_sm90_softcap, true)

// Combines the splits: out is the sum of their partials, weighted by 2^(log2-sum-exp2). One warp
// per row. A sink acts as an extra partial of zeros.
extern "C" __global__ void __launch_bounds__(256)
    attention_prefill_sm90_combine(const float* partial, const float* sinks, scalar_t* out,
                                   float* lse, int64_t out_stride_t, int64_t out_stride_h,
                                   int64_t rows, int num_heads, int value_dim, int splits) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  const int lane_idx = threadIdx.x % 32;
  if (row >= rows) return;
  const float* const sums = partial + splits * rows * value_dim + row;
  const float sink = sinks == nullptr ? -kInf : sinks[row % num_heads] * kLog2E;
  float high = sink;
  for (int split = 0; split < splits; ++split) high = fmaxf(high, sums[split * rows]);
  float total = exp2_approx(sink - finite_or_zero(high));
  for (int split = 0; split < splits; ++split)
    total += exp2_approx(sums[split * rows] - finite_or_zero(high));
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  scalar_t* const to = out + row / num_heads * out_stride_t + row % num_heads * out_stride_h;
  for (int column = 4 * lane_idx; column < value_dim; column += 128) {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int split = 0; split < splits; ++split) {
      const float weight = exp2_approx(sums[split * rows] - finite_or_zero(high)) * inverse;
      const float4 y =
          *reinterpret_cast<const float4*>(partial + (split * rows + row) * value_dim + column);
      x.x += weight * y.x;
      x.y += weight * y.y;
      x.z += weight * y.z;
      x.w += weight * y.w;
    }
    *reinterpret_cast<uint2*>(to + column) =
        make_uint2(pack2<scalar_t>(x.x, x.y), pack2<scalar_t>(x.z, x.w));
  }
  if (lse != nullptr && lane_idx == 0)
    lse[row] = total == 0.0f ? -kInf : (high + log2f(total)) * kLn2;
}
