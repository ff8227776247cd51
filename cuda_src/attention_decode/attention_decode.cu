// Attention of each sequence's newest tokens over its paged keys, with the keys split across CTAs.
//
//   out = softmax(cap(scale * Q K^T) + mask) V        for every sequence b and query head h
//
// Query i of Q sees keys 0 to len - Q + i. A sink adds exp(sink) to the softmax denominator of its
// head's rows: once per row, when the row is finished, not in each split.
//
// Arguments: AttentionDecodeParams, below.
// Macros: the attributes of Tile in engine/kernels/_attention.py; ENGINE_DTYPE 0 is float32.
//
// Numerics: scores, softmax and sums are in float; P is rounded to scalar_t before P V. Partials
// are weighted by 2^(maximum - largest maximum) and summed in key order, so a result does not
// depend on which split finishes first.
// Parallelisation: a CTA processes one split of the keys of one sequence and key/value head, for up
// to kRows rows (token, head of the group). With few rows the warps split the keys instead of the
// rows. Lengths are read only on the device, and CTAs of empty splits exit immediately, so a
// captured graph stays valid while sequences grow. attention_decode_combine uses one warp per row.
// Mirror: engine/reference/attention_decode.py
#if ENGINE_DTYPE == 0
#include "common/attention_simt.cuh"
using Core = SimtAttention<HEAD_DIM, WARPS_M, ROW_TILES>;
#else
#include "common/attention_mma.cuh"
using Core = MmaAttention<HEAD_DIM, WARPS_M, WARPS_N, ROW_TILES, TILE_KEYS, STAGES, COLUMN_WARPS>;
#endif
static_assert(Core::kSharedBytes == SHARED_BYTES, "kernels/_attention.py computes another size");

#include "common/sequence_length.cuh"

constexpr int kHeadDim = HEAD_DIM;  // D, padded
constexpr int kSplitGrain = 64;     // keys per split are a multiple of this, except in the last
constexpr int kCombineThreads = 128;

// Parameters of both kernels. Strides are in elements.
struct AttentionDecodeParams {
  const scalar_t* q;                // (B, Q, H, D)
  const page_t *k_pages, *v_pages;  // (P, K, block_size, D), equal strides
  const int* block_tables;          // (B, NB) token j is in page block_tables[b, j / block_size]
  const int* context_lens;          // (B,) number of keys per sequence, including the Q new ones
  const uint64_t* tree_masks;       // (B, Q) bit j of mask i: token i sees token j <= i; or null
  const float* sinks;               // (H,) extra logit of each row's softmax; or null
  scalar_t* out;                    // (B, Q, H, D)
  float* lse;                       // (B, Q, H) contiguous, or null
  float* partial_o;                 // (num_splits, B * H * Q, D) sums of P V; null if one split
  float* partial_stats;             // (num_splits, B * H * Q, 2) maximum (log2), sum of P
  int64_t q_stride_b, q_stride_t, q_stride_h;
  int64_t page_stride, head_stride, token_stride;  // elements, in k_pages and in v_pages
  int64_t table_stride;
  int64_t out_stride_b, out_stride_t, out_stride_h;
  int64_t max_keys;             // NB * block_size
  int64_t num_rows;             // B * H * Q
  int num_queries, num_heads;   // Q, H
  int num_kv_heads, group;      // K, H / K
  int head_dim;                 // D
  int block_shift, num_blocks;  // log2(block_size), P
  int window;                   // see RowRule
  int num_splits;
  int is_vector;                    // all rows consist of whole, aligned 16-byte words
  float score_inner, score_factor;  // ScoreRule
  const float *k_scale, *v_scale;   // (K,) scales of quantized pages, or null

  __device__ __forceinline__ bool has_partials() const { return partial_o != nullptr; }
};

// Divides the keys that any row of a sequence sees into splits. Both kernels use the same plan.
struct SplitPlan {
  int first, chunk, count;  // first key, keys per split, number of splits with keys

  __device__ __forceinline__ SplitPlan(const RowRule& rows, int num_keys, int num_splits) {
    first = rows.first_key(0) / kSplitGrain * kSplitGrain;
    const int total = max(num_keys - first, 0);
    chunk = ((total + num_splits - 1) / num_splits + kSplitGrain - 1) / kSplitGrain * kSplitGrain;
    count = total == 0 ? 0 : (total + chunk - 1) / chunk;
  }
};

// Writes the partial rows of one split; same interface as Output.
struct SplitOutput {
  float* o;  // row 0 of this sequence and key/value head
  float* stats;
  int head_dim;
  bool is_vector;

  __device__ __forceinline__ void row(int row, float max, float sum) const {
    store_vec(stats + row * 2, Vec<float, 2>{max, sum});
  }
  __device__ __forceinline__ float factor(int, float, float) const { return 1.0f; }
  __device__ __forceinline__ float* at(int row) const {
    return o + static_cast<int64_t>(row) * head_dim;
  }
  __device__ __forceinline__ void pair(float* row, int column, float x, float y) const {
    if (column < head_dim) store_vec(row + column, Vec<float, 2>{x, y});
  }
  __device__ __forceinline__ void single(float* row, int column, float x) const {
    if (column < head_dim) row[column] = x;
  }
};

// Destination of one sequence's results for one key/value head.
__device__ __forceinline__ Output output_of(const AttentionDecodeParams& p, int b, int kv_head,
                                            bool is_vector) {
  const int head = kv_head * p.group;
  const int64_t lse_begin = static_cast<int64_t>(b) * p.num_queries * p.num_heads + head;
  return Output{p.out + b * p.out_stride_b + head * p.out_stride_h,
                p.out_stride_t,
                p.out_stride_h,
                p.lse == nullptr ? nullptr : p.lse + lse_begin,
                p.sinks == nullptr ? nullptr : p.sinks + head,
                p.num_heads,
                p.group,
                p.head_dim,
                is_vector,
                kHasCodes ? p.v_scale[kv_head] : 1.0f};
}

extern "C" __global__ void __launch_bounds__(Core::kThreads, 2)
    attention_decode(const __grid_constant__ AttentionDecodeParams p) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  scalar_t* const smem = reinterpret_cast<scalar_t*>(smem_bytes);
  const int b = blockIdx.x, kv_head = blockIdx.y;
  const int split = blockIdx.z % p.num_splits, row_begin = blockIdx.z / p.num_splits * Core::kRows;
  const int num_keys = sequence_length(p.context_lens, b, p.max_keys);
  RowRule rows(p.num_queries, p.group, num_keys, true, p.window);
  if (p.tree_masks != nullptr) rows.tree = p.tree_masks + static_cast<int64_t>(b) * p.num_queries;
  const SplitPlan splits(rows, num_keys, p.num_splits);
  if (split >= splits.count && p.has_partials()) return;  // the combine kernel does not read it

  const bool is_vector = p.is_vector != 0;
  const Queries queries{p.q + b * p.q_stride_b + kv_head * p.group * p.q_stride_h, p.q_stride_t,
                        p.q_stride_h, p.head_dim, is_vector};
  const int64_t kv_begin = kv_head * p.head_stride;
  const KeyValues kv{p.k_pages + kv_begin,
                     p.v_pages + kv_begin,
                     p.block_tables + b * p.table_stride,
                     p.token_stride,
                     p.token_stride,
                     p.page_stride,
                     p.block_shift,
                     p.num_blocks,
                     p.head_dim,
                     p.head_dim,
                     is_vector};
  const int last_row = min(row_begin + Core::kRows, rows.count) - 1;
  const int begin = max(splits.first + split * splits.chunk, rows.first_key(row_begin));
  const int end =
      min(min(splits.first + (split + 1) * splits.chunk, num_keys), rows.last_key(last_row) + 1);

  ScoreRule rule{p.score_inner, p.score_factor};
  if constexpr (kHasCodes) rule = rule.scaled(p.k_scale[kv_head]);
  Core core;
  core.run(smem, queries, kv, rows, rule, row_begin, begin, end);
  if (p.has_partials()) {
    const int64_t row =
        split * p.num_rows + (static_cast<int64_t>(b) * p.num_kv_heads + kv_head) * rows.count;
    core.finish(smem, rows, row_begin,
                SplitOutput{p.partial_o + row * p.head_dim, p.partial_stats + row * 2, p.head_dim,
                            is_vector});
  } else {
    core.finish(smem, rows, row_begin, output_of(p, b, kv_head, is_vector));
  }
}

extern "C" __global__ void __launch_bounds__(kCombineThreads)
    attention_decode_combine(const __grid_constant__ AttentionDecodeParams p) {
  const int64_t index =
      static_cast<int64_t>(blockIdx.x) * (kCombineThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (index >= p.num_rows) return;
  const int lane_idx = threadIdx.x % kWarpSize;
  const int rows_per_head = p.num_queries * p.group, row = index % rows_per_head;
  const int kv_head = index / rows_per_head % p.num_kv_heads;
  const int b = index / rows_per_head / p.num_kv_heads;
  const int num_keys = sequence_length(p.context_lens, b, p.max_keys);
  const RowRule rows(p.num_queries, p.group, num_keys, true, p.window);
  const int count = SplitPlan(rows, num_keys, p.num_splits).count;

  float top = -kInf;
  for (int split = lane_idx; split < count; split += kWarpSize)
    top = fmaxf(top, p.partial_stats[(split * p.num_rows + index) * 2]);
  top = warp_max(top);

  float sum = 0.0f, o[kHeadDim / kWarpSize] = {};
#pragma unroll 2
  for (int split = 0; split < count; ++split) {
    const int64_t partial = split * p.num_rows + index;
    const Vec<float, 2> stats = load_vec<float, 2>(p.partial_stats + partial * 2);
    const float* part = p.partial_o + partial * p.head_dim;
    const float weight = exp2_approx(stats.v[0] - finite_or_zero(top));
    sum += stats.v[1] * weight;
#pragma unroll
    for (int c = 0; c < kHeadDim / kWarpSize; ++c)
      if (c * kWarpSize + lane_idx < p.head_dim) o[c] += part[c * kWarpSize + lane_idx] * weight;
  }
  const Output output = output_of(p, b, kv_head, false);
  if (lane_idx == 0) output.row(row, top, sum);
  const float factor = output.factor(row, top, sum);
#pragma unroll
  for (int c = 0; c < kHeadDim / kWarpSize; ++c)
    output.single(output.at(row), c * kWarpSize + lane_idx, o[c] * factor);
}
