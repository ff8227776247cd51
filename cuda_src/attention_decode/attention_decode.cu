// Attention of the newest tokens of every sequence against its pages, the keys split over blocks.
//
//   out = softmax(cap(scale * Q K^T) + mask) V        for every sequence b and query head h
//
//   q             (B, Q, H, D)          scalar_t   query i of Q sees keys 0 to len - Q + i
//   k, v          (P, K, block_size, D) scalar_t   token j: page block_tables[b, j / block_size]
//   block_tables  (B, NB) int32                    read only where context_lens says so
//   context_lens  (B,)    int32                    keys of each sequence, the Q new ones included
//   tree_masks    (B, Q)  uint64   bit j of token i: it sees token j, of those up to itself; or null
//   out           (B, Q, H, D) scalar_t            lse (B, Q, H) float, contiguous, or null
//   partial_o     (num_splits, B * H * Q, D) float       a split's sum of P V; null: one split
//   partial_stats (num_splits, B * H * Q, 2) float       a split's maximum (log2), sum of P
//
// Numerics: as attention_prefill. Splits are combined exactly: each is weighed by 2^(its maximum -
// the largest), in the order of the keys, so a result does not depend on who finished first.
// Parallelisation: a block takes one split of the keys of one sequence and key/value head, for up
// to kRows rows (token, head of the group). With few rows its warps divide the keys instead.
// Lengths are read on the device only, and splits without keys leave at once: a captured graph
// stays right while sequences grow. attention_decode_combine then takes one warp a row.
// Mirror: engine/reference/attention_decode.py
#if ENGINE_DTYPE == 0
#include "common/attention_simt.cuh"
using Core = SimtAttention<HEAD_DIM, WARPS_M, ROW_TILES>;
#else
#include "common/attention_mma.cuh"
using Core = MmaAttention<HEAD_DIM, WARPS_M, WARPS_N, ROW_TILES, TILE_KEYS, STAGES>;
#endif
static_assert(Core::kSharedBytes == SHARED_BYTES, "kernels/_attention.py computes another size");

constexpr int kSplitGrain = 64;  // a split holds a multiple of this many keys, except the last
constexpr int kCombineThreads = 128;

// How the keys that any row of a sequence sees are cut: the same in both kernels.
struct Splits {
  int first, chunk, count;

  __device__ __forceinline__ Splits(const RowRule& rows, int num_keys, int num_splits) {
    first = rows.first_key(0) / kSplitGrain * kSplitGrain;
    const int total = max(num_keys - first, 0);
    chunk = ((total + num_splits - 1) / num_splits + kSplitGrain - 1) / kSplitGrain * kSplitGrain;
    count = total == 0 ? 0 : (total + chunk - 1) / chunk;
  }
};

// A writer (see Output) of one split's unfinished rows.
struct PartialOutput {
  float* o;  // row 0 of this sequence and key/value head
  float* stats;
  int head_dim;
  bool is_vector;

  __device__ __forceinline__ void row(int row, float max, float sum) const {
    store_vec(stats + row * 2, Vec<float, 2>{max, sum});
  }
  __device__ __forceinline__ float factor(float) const { return 1.0f; }
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

// SAFETY: a length that does not fit the block table is cut to it.
__device__ __forceinline__ int sequence_length(const int* context_lens, int b, int64_t max_keys) {
  return static_cast<int>(min(static_cast<int64_t>(max(context_lens[b], 0)), max_keys));
}

extern "C" __global__ void __launch_bounds__(Core::kThreads, 2)
    attention_decode(const scalar_t* q, const scalar_t* k, const scalar_t* v,
                     const int* block_tables, const int* context_lens, const uint64_t* tree_masks,
                     scalar_t* out, float* lse, float* partial_o, float* partial_stats,
                     int64_t q_stride_b, int64_t q_stride_t, int64_t q_stride_h,
                     int64_t page_stride, int64_t table_stride, int64_t out_stride_b,
                     int64_t out_stride_t, int64_t out_stride_h, int64_t max_keys, int num_queries,
                     int num_heads, int group, int head_dim, int block_shift, int num_blocks,
                     int window, int num_splits, int is_vector, float score_inner,
                     float score_factor) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  scalar_t* const smem = reinterpret_cast<scalar_t*>(smem_bytes);
  const int b = blockIdx.x, kv_head = blockIdx.y;
  const int split = blockIdx.z % num_splits, row_begin = blockIdx.z / num_splits * Core::kRows;
  const int num_keys = sequence_length(context_lens, b, max_keys);
  RowRule rows(num_queries, group, num_keys, true, window);
  if (tree_masks != nullptr) rows.tree = tree_masks + static_cast<int64_t>(b) * num_queries;
  const Splits splits(rows, num_keys, num_splits);
  if (split >= splits.count && partial_o != nullptr) return;  // the combine does not read it

  const int head = kv_head * group;
  const Queries queries{q + b * q_stride_b + head * q_stride_h, q_stride_t, q_stride_h, head_dim,
                        is_vector != 0};
  const int64_t kv_begin = (static_cast<int64_t>(kv_head) << block_shift) * head_dim;
  const KeyValues kv{k + kv_begin,  v + kv_begin, block_tables + b * table_stride,
                     head_dim,      head_dim,     page_stride,
                     block_shift,   num_blocks,   head_dim,
                     is_vector != 0};
  const int last_row = min(row_begin + Core::kRows, rows.count) - 1;
  const int begin = max(splits.first + split * splits.chunk, rows.first_key(row_begin));
  const int end =
      min(min(splits.first + (split + 1) * splits.chunk, num_keys), rows.last_key(last_row) + 1);

  Core core;
  core.run(smem, queries, kv, rows, ScoreRule{score_inner, score_factor}, row_begin, begin, end);
  if (partial_o != nullptr) {
    const int64_t num_slots = static_cast<int64_t>(gridDim.x) * gridDim.y * rows.count;
    const int64_t slot =
        split * num_slots + (static_cast<int64_t>(b) * gridDim.y + kv_head) * rows.count;
    core.finish(smem, rows, row_begin,
                PartialOutput{partial_o + slot * head_dim, partial_stats + slot * 2, head_dim,
                              is_vector != 0});
  } else {
    const int64_t lse_begin = static_cast<int64_t>(b) * num_queries * num_heads + head;
    core.finish(smem, rows, row_begin,
                Output{out + b * out_stride_b + head * out_stride_h, out_stride_t, out_stride_h,
                       lse == nullptr ? nullptr : lse + lse_begin, num_heads, group, head_dim,
                       is_vector != 0});
  }
}

extern "C" __global__ void __launch_bounds__(kCombineThreads)
    attention_decode_combine(const float* partial_o, const float* partial_stats,
                             const int* context_lens, scalar_t* out, float* lse,
                             int64_t out_stride_b, int64_t out_stride_t, int64_t out_stride_h,
                             int64_t max_keys, int64_t num_slots, int num_queries, int num_heads,
                             int num_kv_heads, int head_dim, int window, int num_splits) {
  const int64_t slot =
      static_cast<int64_t>(blockIdx.x) * (kCombineThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (slot >= num_slots) return;
  const int lane_idx = threadIdx.x % kWarpSize, group = num_heads / num_kv_heads;
  const int num_rows = num_queries * group, row = slot % num_rows;
  const int kv_head = slot / num_rows % num_kv_heads, b = slot / num_rows / num_kv_heads;
  const int num_keys = sequence_length(context_lens, b, max_keys);
  const int count =
      Splits(RowRule(num_queries, group, num_keys, true, window), num_keys, num_splits).count;

  float top = -kInf;
  for (int split = lane_idx; split < count; split += kWarpSize)
    top = fmaxf(top, partial_stats[(split * num_slots + slot) * 2]);
  top = warp_max(top);

  float sum = 0.0f, o[HEAD_DIM / kWarpSize] = {};
#pragma unroll 2
  for (int split = 0; split < count; ++split) {
    const Vec<float, 2> stats = load_vec<float, 2>(partial_stats + (split * num_slots + slot) * 2);
    const float* part = partial_o + (split * num_slots + slot) * head_dim;
    const float weight = exp2_approx(stats.v[0] - finite_or_zero(top));
    sum += stats.v[1] * weight;
#pragma unroll
    for (int c = 0; c < HEAD_DIM / kWarpSize; ++c)
      if (c * kWarpSize + lane_idx < head_dim) o[c] += part[c * kWarpSize + lane_idx] * weight;
  }
  const int head = kv_head * group;
  const int64_t lse_begin = static_cast<int64_t>(b) * num_queries * num_heads + head;
  const Output output{out + b * out_stride_b + head * out_stride_h,
                      out_stride_t,
                      out_stride_h,
                      lse == nullptr ? nullptr : lse + lse_begin,
                      num_heads,
                      group,
                      head_dim,
                      false};
  if (lane_idx == 0) output.row(row, top, sum);
#pragma unroll
  for (int c = 0; c < HEAD_DIM / kWarpSize; ++c)
    output.single(output.at(row), c * kWarpSize + lane_idx, o[c] * output.factor(sum));
}
