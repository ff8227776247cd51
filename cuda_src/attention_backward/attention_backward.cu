// The gradients of attention over whole sequences of any lengths: dQ, dK and dV in three launches.
//
//   S = cap(scale * Q K^T) + mask      P = exp(S - lse)       dP = dO V^T
//   delta = sum(dO * O)                dS = P * (dP - delta) * (1 - (S / softcap)^2)
//   dV = P^T dO                        dK = scale * dS^T Q    dQ = scale * dS K
//
//   q, dout, out (Tq, H, D)  scalar_t   sequence b: rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
//   k, v         (Tk, K, D)  scalar_t   sequence b: rows cu_seqlens_k[b] to cu_seqlens_k[b + 1]
//   lse, delta   (Tq, H) float          log-sum-exp of the forward pass; what _delta computes
//   dq           (Tq, H, D)  scalar_t   dk, dv (Tk, K, D) scalar_t: contiguous
//   *_stride_t, *_stride_h              elements from token to token and from head to head
//
// Numerics: S, P, dP, dS and all sums in float; P is rounded to scalar_t for dV, dS for dK and dQ;
// each result is rounded once, the sum over the query heads of a key/value head inside. Float
// inputs never meet a tensor core, so nothing becomes TF32.
// Parallelisation: _keys: a block takes a tile of keys of one key/value head and walks over the
// queries that see it, head by head; _queries: a tile of queries of one head, over its keys. Both
// compute S and dP: seven products instead of five buy sums in a fixed order, without atomics.
// Mirror: engine/reference/attention_backward.py
#if ENGINE_DTYPE == 0
#include "attention_backward/simt.cuh"
template <bool kOfKeys>
using Core = SimtBackward<HEAD_DIM, WARPS, WARP_ROWS, kOfKeys>;
#else
#include "attention_backward/mma.cuh"
template <bool kOfKeys>
using Core = MmaBackward<HEAD_DIM, WARPS, STREAM, STAGES, kOfKeys>;
#endif
using KeyTile = Core<true>;
using QueryTile = Core<false>;
static_assert(KeyTile::kSharedBytes == SHARED_BYTES, "kernels/attention_backward.py: another size");

// delta[t, h] = sum(dout[t, h] * out[t, h]): a warp a row.
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_delta(const scalar_t* dout, const scalar_t* out, float* delta,
                             int64_t dout_stride_t, int64_t dout_stride_h, int64_t out_stride_t,
                             int64_t out_stride_h, int64_t rows, int num_heads, int head_dim) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  const int64_t token = row / num_heads, head = row % num_heads;
  const scalar_t* const a = dout + token * dout_stride_t + head * dout_stride_h;
  const scalar_t* const b = out + token * out_stride_t + head * out_stride_h;
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < head_dim; i += 32) sum += to_float(a[i]) * to_float(b[i]);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) delta[row] = sum;
}

#define ENGINE_BACKWARD_PARAMS                                                                     \
  const scalar_t *dout, const scalar_t *q, const scalar_t *k, const scalar_t *v, const float *lse, \
      const float *delta, const int *cu_seqlens_q, const int *cu_seqlens_k, scalar_t *dq,          \
      scalar_t *dk, scalar_t *dv, int64_t dout_stride_t, int64_t dout_stride_h,                    \
      int64_t q_stride_t, int64_t q_stride_h, int64_t k_stride_t, int64_t k_stride_h,              \
      int64_t v_stride_t, int64_t v_stride_h, int total_q, int total_k, int num_heads, int group,  \
      int head_dim, int causal, int window, int is_vector, float score_inner, float score_factor,  \
      float scale

extern "C" __global__ void __launch_bounds__(KeyTile::kThreads, 1)
    attention_backward_keys(ENGINE_BACKWARD_PARAMS) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  constexpr int kParts = (HEAD_DIM + KeyTile::kColumns - 1) / KeyTile::kColumns;
  const int b = blockIdx.z, kv_head = blockIdx.y;
  const int row_begin = static_cast<int>(blockIdx.x) / kParts * KeyTile::kRows;
  const int column = static_cast<int>(blockIdx.x) % kParts * KeyTile::kColumns;
  const Sequence sequence(cu_seqlens_q, cu_seqlens_k, b, total_q, total_k, causal, window);
  if (row_begin >= sequence.num_k) return;
  const bool vector = is_vector != 0;
  const int num_kv_heads = num_heads / group;
  const Rows k_rows{k + sequence.k_begin * k_stride_t + kv_head * k_stride_h, k_stride_t,
                    sequence.num_k, head_dim, vector};
  const Rows v_rows{v + sequence.k_begin * v_stride_t + kv_head * v_stride_h, v_stride_t,
                    sequence.num_k, head_dim, vector};
  const int end_row = min(row_begin + KeyTile::kRows, sequence.num_k);
  const int begin = sequence.first_query(row_begin), end = sequence.end_query(end_row);
  KeyTile core;
  core.start();
#pragma unroll 1
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const Rows q_rows{q + sequence.q_begin * q_stride_t + head * q_stride_h, q_stride_t,
                      sequence.num_q, head_dim, vector};
    const Rows dout_rows{dout + sequence.q_begin * dout_stride_t + head * dout_stride_h,
                         dout_stride_t, sequence.num_q, head_dim, vector};
    const int64_t stat = sequence.q_begin * num_heads + head;
    core.run(smem_bytes, sequence, ScoreRule{score_inner, score_factor}, k_rows, v_rows, q_rows,
             dout_rows, lse + stat, delta + stat, num_heads, row_begin, begin, end, column);
  }
  const int64_t stride = static_cast<int64_t>(num_kv_heads) * head_dim;
  const int64_t to = sequence.k_begin * stride + kv_head * head_dim;
  core.store(GradientRows{dk + to, stride, sequence.num_k, head_dim, scale},
             GradientRows{dv + to, stride, sequence.num_k, head_dim, 1.0f}, row_begin, column);
}

extern "C" __global__ void __launch_bounds__(QueryTile::kThreads, 1)
    attention_backward_queries(ENGINE_BACKWARD_PARAMS) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  const int b = blockIdx.z, head = blockIdx.y, kv_head = head / group;
  const int row_begin = static_cast<int>(gridDim.x - 1 - blockIdx.x) * QueryTile::kRows;
  const Sequence sequence(cu_seqlens_q, cu_seqlens_k, b, total_q, total_k, causal, window);
  if (row_begin >= sequence.num_q) return;
  const bool vector = is_vector != 0;
  const Rows q_rows{q + sequence.q_begin * q_stride_t + head * q_stride_h, q_stride_t,
                    sequence.num_q, head_dim, vector};
  const Rows dout_rows{dout + sequence.q_begin * dout_stride_t + head * dout_stride_h,
                       dout_stride_t, sequence.num_q, head_dim, vector};
  const Rows k_rows{k + sequence.k_begin * k_stride_t + kv_head * k_stride_h, k_stride_t,
                    sequence.num_k, head_dim, vector};
  const Rows v_rows{v + sequence.k_begin * v_stride_t + kv_head * v_stride_h, v_stride_t,
                    sequence.num_k, head_dim, vector};
  const int last_row = min(row_begin + QueryTile::kRows, sequence.num_q) - 1;
  const int begin = sequence.first_key(row_begin);
  const int end = min(sequence.last_key(last_row) + 1, sequence.num_k);
  const int64_t stat = sequence.q_begin * num_heads + head;
  QueryTile core;
  core.start();
  core.run(smem_bytes, sequence, ScoreRule{score_inner, score_factor}, q_rows, dout_rows, k_rows,
           v_rows, lse + stat, delta + stat, num_heads, row_begin, begin, end, 0);
  const int64_t stride = static_cast<int64_t>(num_heads) * head_dim;
  const GradientRows to{dq + sequence.q_begin * stride + head * head_dim, stride, sequence.num_q,
                        head_dim, scale};
  core.store(to, to, row_begin, 0);
}
