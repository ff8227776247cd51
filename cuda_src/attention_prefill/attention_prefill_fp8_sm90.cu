// FP8 flash attention on Hopper: attention_prefill_fp8.cu with wgmma and TMA.
//
//   out = softmax(scale * Q K^T * q_scale k_scale + mask) V * v_scale   for every sequence, head
//
// Arguments: AttentionPrefillFp8Sm90Params, below.
//
// Numerics: see attention_prefill_fp8_softmax_sm90.cuh. P is rounded to e4m3 times a power of 2.
// The softmax divides by the sum of the rounded P, which eight extra columns beside V compute, each
// with ones for an eighth of the keys. The tensor cores keep only about 14 bits of a sum, so every
// SUM_TILES key tiles their sums are added to float32 sums in shared memory. A row's result depends
// bitwise on its own query and keys alone.
// Parallelisation: one persistent CTA per SM, which fetches work tiles
// (attention_prefill_scheduler_sm90.cuh). One producer thread loads Q, K and V. Two warps transpose
// V, as 8-bit wgmma requires K-major operands. Each consumer warpgroup owns 64 rows and runs
// independently: while one waits for wgmma, the others compute exponentials.
// Mirror: engine/reference/attention_prefill_fp8.py
#include "attention_prefill/attention_prefill_fp8_consumer_sm90.cuh"
#include "attention_prefill/attention_prefill_fp8_epilogue_sm90.cuh"
#include "attention_prefill/attention_prefill_fp8_producer_sm90.cuh"

static_assert(SharedMemory::kBytes == SHARED_BYTES,
              "kernels/attention_prefill_fp8/sm90.py computes another size");

// Strides are in elements: _t between tokens, _h between heads.
struct AttentionPrefillFp8Sm90Params {
  TensorMap q_map;          // q (Tq, K, H / K, D) e4m3; TMA box: D x group x 1 x tile_tokens
  TensorMap k_map;          // k (Tk, K, D) e4m3; TMA box: D x 1 head x 128 keys
  TensorMap v_map;          // v, same shape and box as k
  const int* cu_seqlens_q;  // for this and the next six see AttentionPrefillFp8Params
  const int* cu_seqlens_k;
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  scalar_t* out;
  float* lse;
  int* counter;  // work tiles fetched so far; 0 before and after the launch
  int64_t out_stride_t, out_stride_h;
  int64_t max_keys;  // Tk
  int total_q, num_heads, num_kv_heads, head_dim;
  int num_pairs, tiles_of_pair, section;  // see Problem
  int causal;
  float factor;  // scale * log2(e)
};

// Dense keys, tiles of one size and no splits; fields for paged keys stay null or zero.
__device__ __forceinline__ Problem make_problem(const AttentionPrefillFp8Sm90Params& p) {
  Problem problem{};
  problem.cu_seqlens_q = p.cu_seqlens_q;
  problem.cu_seqlens_k = p.cu_seqlens_k;
  problem.counter = p.counter;
  problem.max_keys = p.max_keys;
  problem.total_q = p.total_q;
  problem.group = p.num_heads / p.num_kv_heads;
  problem.num_kv_heads = p.num_kv_heads;
  problem.tile_tokens = problem.short_tokens = kRows / problem.group;
  problem.num_pairs = p.num_pairs;
  problem.section = p.section;
  problem.tiles_of_pair = problem.long_tiles = p.tiles_of_pair;
  problem.total = p.num_pairs * p.tiles_of_pair;
  problem.splits = 1;
  problem.causal = p.causal;
  problem.reach = 1u << 31;
  return problem;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_prefill_fp8_sm90(const __grid_constant__ AttentionPrefillFp8Sm90Params p) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  const SharedMemory smem(smem_bytes);
  const Problem problem = make_problem(p);
  if (threadIdx.x == 0) smem.init_barriers();
  smem.init_tiles(problem);
  __syncthreads();
  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    const int warp_idx = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp_idx == 0) {
      if (threadIdx.x == 0) load_tiles(smem, problem, &p.q_map, &p.k_map, &p.v_map);
    } else if (warp_idx <= kTransposers) {
      transpose_values(smem, warp_idx - 1);
    }
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer(smem, problem)
        .run(ScoreFactors{problem, p.q_scale, p.k_scale, p.factor},
             Epilogue{problem, p.v_scale, p.out, p.lse, p.out_stride_t, p.out_stride_h, p.num_heads,
                      p.head_dim, Consumer::Softmax::kOffset});
  }
}
