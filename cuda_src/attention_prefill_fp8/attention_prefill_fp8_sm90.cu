// Flash attention on Hopper in 8 bits: the work of attention_prefill_fp8.cu by wgmma and TMA.
//
//   out = softmax(scale * Q K^T * q_scale k_scale + mask) V * v_scale   for every sequence, head
//
//   q_map  of q (Tq, K, H / K, D) e4m3, boxes of all columns, the heads of one key/value head and
//          tile_tokens tokens
//   k_map, v_map  of k, v (Tk, K, D) e4m3: boxes of all columns, one head and 128 keys
//   cu_seqlens_q, cu_seqlens_k, q_scale, k_scale, v_scale, out, lse: see attention_prefill_fp8.cu
//   counter  int, 0: where blocks take tiles from; 0 again at the end
//
// Numerics: common/softmax_fp8.cuh. P is rounded to e4m3 times a power of 2; the softmax divides by
// the sum of these rounded P, which eight columns beside V give: each has ones for an eighth of the
// keys. The tensor cores keep some 14 bits of a sum, so what they add up goes to float32 sums in
// shared memory every SUM_TILES tiles of keys. A row's bits depend on its own keys and nothing
// else.
// Parallelisation: one block an SM. A warp takes tiles (common/attention_tiles.cuh) and asks TMA
// for them; two warps transpose V, as wgmma wants both operands along k in 8 bits; each consumer
// warpgroup owns 64 rows and runs by itself: while one waits for its products, the others have
// exponentials to make.
// Mirror: engine/reference/attention_prefill_fp8.py
#include "attention_prefill_fp8/tiles_sm90.cuh"

using Core = PrefillFp8<HEAD_DIM, CONSUMERS, STAGES, SPAN, TURNS, LINE_KEYS, SUM_TILES>;
static_assert(Core::kSharedBytes == SHARED_BYTES,
              "kernels/attention_prefill_fp8/sm90.py computes another size");

// What turns q.k into a score in units of log2, for the two rows of a thread.
struct Factors {
  const Problem& problem;
  const float* q_scale;
  const float* k_scale;
  float factor;

  __device__ __forceinline__ float2 operator()(const TileWork& tile, int my_row,
                                               const int (&tokens)[2]) const {
    const float* const q = q_scale + tile.kv_head * problem.group + my_row;
    const float common = factor * k_scale[tile.kv_head];
    return make_float2(common * q[-tokens[0] * problem.group],
                       common * q[8 - tokens[1] * problem.group]);
  }
};

// Where results go.
struct Finish {
  const Problem& problem;
  const float* v_scale;
  scalar_t* out;
  float* lse;
  int64_t stride_t, stride_h;
  int num_heads, head_dim;

  // Sums of rows my_row and my_row + 8: of the columns in transpose_block's order, then of P, of
  // which each thread of four has two eighths.
  template <int kCount>
  __device__ __forceinline__ void operator()(const TileWork& tile, int my_row,
                                             const int (&tokens)[2], int lane,
                                             const float (&o)[kCount],
                                             const float (&base)[2]) const {
    const float scale = v_scale[tile.kv_head];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = o[kCount - 4 + 2 * i] + o[kCount - 3 + 2 * i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (tokens[i] >= tile.tokens) continue;
      const float inverse = sum == 0.0f ? 0.0f : scale / sum;
      const int head = tile.kv_head * problem.group + my_row + 8 * i - tokens[i] * problem.group;
      const int64_t token = tile.first_token + tokens[i];
      if (lse != nullptr && lane % 4 == 0)
        lse[token * num_heads + head] =
            sum == 0.0f ? -kInf : (base[i] - Core::Softmax::kOffset + log2f(sum)) * kLn2;
      scalar_t* const row = out + token * stride_t + head * stride_h + 4 * (lane % 4);
#pragma unroll
      for (int j = 0; j < (kCount - 4) / 8; ++j) {
        const float* const x = o + 8 * j + 2 * i;
        if (16 * j < head_dim)
          *reinterpret_cast<uint2*>(row + 16 * j) = make_uint2(
              pack_pair(x[0] * inverse, x[4] * inverse), pack_pair(x[1] * inverse, x[5] * inverse));
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(Core::kThreads, 1) attention_prefill_fp8_sm90(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const int* cu_seqlens_q, const int* cu_seqlens_k,
    const float* q_scale, const float* k_scale, const float* v_scale, scalar_t* out, float* lse,
    int* counter, int64_t out_stride_t, int64_t out_stride_h, int64_t max_keys, int total_q,
    int num_heads, int num_kv_heads, int head_dim, int num_pairs, int tiles_of_pair, int section,
    int causal, float factor) {
  extern __shared__ __align__(128) unsigned char smem[];
  const Core core(smem);
  const int group = num_heads / num_kv_heads;
  Problem problem{};  // what is not said is of pages, which there are none of
  problem.cu_seqlens_q = cu_seqlens_q;
  problem.cu_seqlens_k = cu_seqlens_k;
  problem.counter = counter;
  problem.max_keys = max_keys;
  problem.total_q = total_q;
  problem.group = group;
  problem.num_kv_heads = num_kv_heads;
  problem.tile_tokens = problem.short_tokens = Core::kRows / group;
  problem.num_pairs = num_pairs;
  problem.section = section;
  problem.tiles_of_pair = problem.long_tiles = tiles_of_pair;
  problem.total = num_pairs * tiles_of_pair;
  problem.splits = 1;
  problem.causal = causal;
  problem.reach = 1u << 31;
  if (threadIdx.x == 0) core.init_barriers();
  core.init_tiles(problem);
  __syncthreads();
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<Core::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) core.produce(&q_map, &k_map, &v_map, problem);
    } else if (warp <= Core::kTransposers) {
      core.transpose(warp - 1);
    }
  } else {
    warpgroup_reg_alloc<Core::kConsumerRegisters>();
    core.consume(
        problem, Factors{problem, q_scale, k_scale, factor},
        Finish{problem, v_scale, out, lse, out_stride_t, out_stride_h, num_heads, head_dim});
  }
}
