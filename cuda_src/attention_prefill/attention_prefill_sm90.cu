// Flash attention on Hopper: the work of attention_prefill.cu, by wgmma, TMA and warps with roles.
//
//   out = softmax(cap(scale * Q K^T) + mask) V        for every sequence b and query head h
//
//   q_map  of q (Tq, K, H / K, D), boxes of 64 columns, the heads of one key/value head and
//          tile_tokens tokens
//   k_map, v_map  of k, v: dense (Tk, K, D), or pages as (P * K * block_size, 1, D): boxes of 64
//          columns, one head and box_keys keys
//   cu_seqlens_q, cu_seqlens_k, block_tables, context_lens, out, lse: see attention_prefill.cu
//   partial  with splits > 1: (splits, Tq, H, D) float, results of each split; after them
//          (splits, Tq, H) float, their log2-sum-exp2
//   counter  int, 0: where blocks take tiles from; 0 again at the end
//   pattern_*  with PATTERN: see common/attention_pattern.cuh
//
// Numerics: as in attention_prefill.cu. Splits are summed in order. A row's bits depend on its own
// keys and the number of splits (and on whether there is a pattern, where tiles of keys have other
// sizes), on nothing else.
// Parallelisation: one block an SM. Of four producer warps one takes tiles
// (common/attention_tiles.cuh) and loads Q, one K and V, with the help of two where pages are
// small; each consumer warpgroup owns 64 rows. It starts the scores of the next keys and P V of
// these, in turns with the others, and finds the maxima of the scores while P V is under way; then
// come the exponentials, while the tensor cores work for the others. Three warpgroups keep them, and
// the units of the exponentials, busier than two, as long as registers suffice.
// Mirror: engine/reference/attention_prefill.py
#include "attention_prefill/tiles_sm90.cuh"

// Where results go.
struct Finish {
  const Problem& problem;
  scalar_t* out;
  float* lse;
  float* partial;
  int64_t stride_t, stride_h;
  int num_heads, head_dim;

  // o, base (what exponents were less, as powers of 2) and sum of rows my_row and my_row + 8; their
  // layout is wgmma.cuh's.
  template <int kCount>
  __device__ __forceinline__ void operator()(const TileWork& tile, int my_row,
                                             const int (&tokens)[2], int lane, float (&o)[kCount],
                                             const float (&base)[2], const float (&sum)[2]) const {
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) inverse[i] = sum[i] == 0.0f ? 0.0f : __fdividef(1.0f, sum[i]);
#pragma unroll
    for (int j = 0; j < kCount; ++j) o[j] *= inverse[j / 2 % 2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = tokens[i] < tile.tokens;
      const int head = tile.kv_head * problem.group + my_row + 8 * i - tokens[i] * problem.group;
      const int64_t token = tile.first_token + tokens[i];
      const float log2_sum = sum[i] == 0.0f ? -kInf : base[i] + log2f(sum[i]);
      if (problem.splits == 1) {
        if (exists && lse != nullptr && lane % 4 == 0)
          lse[token * num_heads + head] = log2_sum * kLn2;
        store_row(out + token * stride_t + head * stride_h, exists, lane, o, i);
      } else if (exists) {
        const int64_t rows = static_cast<int64_t>(problem.total_q) * num_heads;
        const int64_t index = tile.split * rows + token * num_heads + head;
        if (lane % 4 == 0) partial[problem.splits * rows * head_dim + index] = log2_sum;
        float* const row = partial + index * head_dim + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j)
          if (8 * j < head_dim)
            *reinterpret_cast<float2*>(row + 8 * j) =
                make_float2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
      }
    }
  }

  // The four threads of a row hold two columns of each eight: they trade for whole ones.
  template <int kCount>
  __device__ __forceinline__ void store_row(scalar_t* row, bool exists, int lane,
                                            const float (&o)[kCount], int i) const {
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int j = 0; j < kCount / 16; ++j) {
      unsigned x[4];
#pragma unroll
      for (int w = 0; w < 4; ++w)
        x[w] = pack_pair(o[16 * j + 4 * w + 2 * i], o[16 * j + 4 * w + 2 * i + 1]);
      // Neighbours: pairs of words of eights 0, 2 (even threads) or 1, 3 (odd ones).
      unsigned y[4];
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const unsigned other = __shfl_xor_sync(~0u, odd ? x[w] : x[w + 1], 1);
        y[w] = odd ? other : x[w];
        y[w + 1] = odd ? x[w + 1] : other;
      }
      // Across: all four words of eight `lane % 4`.
      const unsigned low = __shfl_xor_sync(~0u, upper ? y[0] : y[2], 2);
      const unsigned high = __shfl_xor_sync(~0u, upper ? y[1] : y[3], 2);
      const uint4 eight =
          upper ? make_uint4(low, high, y[2], y[3]) : make_uint4(y[0], y[1], low, high);
      const int column = 32 * j + 8 * (lane % 4);
      if (exists && column < head_dim) *reinterpret_cast<uint4*>(row + column) = eight;
    }
  }
};

using Core = Prefill<HEAD_DIM, CONSUMERS, TILE_KEYS, STAGES, Q_STAGES, PATTERN != 0>;
static_assert(Core::kSharedBytes == SHARED_BYTES,
              "kernels/attention_prefill/sm90.py computes another size");

#if PATTERN
#define ENGINE_PATTERN_PARAMS                                                                \
  , const unsigned *pattern_blocks, int pattern_words, int pattern_num_q, int pattern_num_k, \
      int pattern_q, int pattern_k, int pattern_offset
#define ENGINE_PATTERN                                                                 \
  Pattern {                                                                            \
    pattern_blocks, pattern_words, pattern_num_q, pattern_num_k, pattern_q, pattern_k, \
        pattern_offset                                                                 \
  }
#else
#define ENGINE_PATTERN_PARAMS
#define ENGINE_PATTERN \
  Pattern {}
#endif

#define ENGINE_PREFILL(NAME, SOFTCAP)                                                              \
  extern "C" __global__ void __launch_bounds__(Core::kThreads, 1) NAME(                            \
      const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,            \
      const __grid_constant__ TensorMap v_map, const int* cu_seqlens_q, const int* cu_seqlens_k,   \
      const int* block_tables, const int* context_lens, scalar_t* out, float* lse, float* partial, \
      int* counter, int64_t table_stride, int64_t out_stride_t, int64_t out_stride_h,              \
      int64_t max_keys, int total_q, int num_heads, int num_kv_heads, int group, int head_dim,     \
      int tile_tokens, int q_bytes, int box_keys, int block_shift, int num_blocks, int num_pairs,  \
      int tiles_of_pair, int long_tiles, int short_tokens, int total, int section, int splits,     \
      int causal, int window, float score_inner, float score_factor ENGINE_PATTERN_PARAMS) {       \
    extern __shared__ __align__(128) unsigned char smem[];                                         \
    const Core core(smem);                                                                         \
    const Problem problem {                                                                        \
      cu_seqlens_q, cu_seqlens_k, block_tables, context_lens, counter, table_stride, max_keys,     \
          total_q, group, num_kv_heads, tile_tokens, q_bytes, box_keys, block_shift, num_blocks,   \
          num_pairs, section, tiles_of_pair, long_tiles, short_tokens, total, splits, causal,      \
          window > 0 ? static_cast<unsigned>(window) : 1u << 31, ENGINE_PATTERN                    \
    };                                                                                             \
    if (threadIdx.x == 0) core.init_barriers(problem);                                             \
    core.init_queries(problem);                                                                    \
    __syncthreads();                                                                               \
    if (threadIdx.x < 128 * CONSUMERS) {                                                           \
      warpgroup_reg_alloc<Core::kConsumerRegisters>();                                             \
      core.consume<SOFTCAP>(                                                                       \
          problem, ScoreRule{score_inner, score_factor},                                           \
          Finish{problem, out, lse, partial, out_stride_t, out_stride_h, num_heads, head_dim});    \
    } else {                                                                                       \
      warpgroup_reg_dealloc<Core::kProducerRegisters>();                                           \
      const int warp = threadIdx.x / 32 - 4 * CONSUMERS;                                           \
      if (warp == 0)                                                                               \
        core.plan(&q_map, problem);                                                                \
      else if (warp == 1)                                                                          \
        core.load(&k_map, &v_map, problem);                                                        \
      else if (core.has_help(problem))                                                             \
        core.help(&k_map, &v_map, problem);                                                        \
    }                                                                                              \
  }
ENGINE_PREFILL(attention_prefill_sm90, false)
ENGINE_PREFILL(attention_prefill_sm90_softcap, true)

// out = sum of the splits' results, weighted by what each knows of the softmax: a warp a row.
extern "C" __global__ void __launch_bounds__(256)
    attention_prefill_sm90_combine(const float* partial, scalar_t* out, float* lse,
                                   int64_t out_stride_t, int64_t out_stride_h, int64_t rows,
                                   int num_heads, int head_dim, int splits) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  const float* const sums = partial + splits * rows * head_dim + row;
  float high = -kInf;
  for (int split = 0; split < splits; ++split) high = fmaxf(high, sums[split * rows]);
  float total = 0.0f;
  for (int split = 0; split < splits; ++split)
    total += exp2_approx(sums[split * rows] - finite_or_zero(high));
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  scalar_t* const to = out + row / num_heads * out_stride_t + row % num_heads * out_stride_h;
  for (int column = 4 * lane; column < head_dim; column += 128) {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int split = 0; split < splits; ++split) {
      const float weight = exp2_approx(sums[split * rows] - finite_or_zero(high)) * inverse;
      const float4 y =
          *reinterpret_cast<const float4*>(partial + (split * rows + row) * head_dim + column);
      x.x += weight * y.x;
      x.y += weight * y.y;
      x.z += weight * y.z;
      x.w += weight * y.w;
    }
    *reinterpret_cast<uint2*>(to + column) = make_uint2(pack_pair(x.x, x.y), pack_pair(x.z, x.w));
  }
  if (lse != nullptr && lane == 0) lse[row] = total == 0.0f ? -kInf : (high + log2f(total)) * kLn2;
}
