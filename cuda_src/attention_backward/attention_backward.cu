// Attention backward pass over whole sequences of any lengths: dQ, dK and dV in three launches.
//
//   S = cap(scale * Q K^T) + mask      P = exp(S - lse)       dP = dO V^T
//   delta = sum(dO * O)                dS = P * (dP - delta) * (1 - (S / softcap)^2)
//   dV = P^T dO                        dK = scale * dS^T Q    dQ = scale * dS K
//
// dsinks = -sum(exp(sink - lse) * delta) over a head's tokens, in a fourth launch
// (attention_backward_sinks.cuh). If lse has a gradient dlse too, delta is sum(dO * O) - dlse.
// Compiled with PATTERN, a query sees only the keys that a pattern allows (attention_pattern.cuh),
// and tiles that it hides from a whole row tile are neither loaded nor computed.
//
// Arguments: AttentionBackwardParams, below.
//
// Numerics: S, P, dP, dS and all sums are in float; P is rounded to scalar_t for dV, dS for dK and
// dQ. Each result is rounded once, after summing over the query heads of its key/value head. Float
// inputs never use tensor cores, so nothing is rounded to TF32.
// Parallelisation: a block of _keys owns a key tile of one key/value head and loops over the
// queries that see it, head by head; a block of _queries owns a query tile of one head and loops
// over the keys it sees. Both compute S and dP: seven matrix products instead of five, but sums are
// formed in a fixed order without atomics.
// Mirror: engine/reference/attention_backward.py
#include "attention_backward/attention_backward_sinks.cuh"
#if ENGINE_DTYPE == 0
#include "attention_backward/attention_backward_simt.cuh"
#else
#include "attention_backward/attention_backward_mma.cuh"
#endif

// Module configuration: BackwardTile in kernels/attention_backward/attention_backward.py.
constexpr int kHeadDim = HEAD_DIM;
#if ENGINE_DTYPE == 0
template <bool kOfKeys>
using Core = SimtBackward<kHeadDim, WARPS, WARP_ROWS, kOfKeys>;
#else
template <bool kOfKeys>
using Core = MmaBackward<kHeadDim, WARPS, STREAM, STAGES, kOfKeys>;
#endif
using KeyTile = Core<true>;
using QueryTile = Core<false>;
static_assert(KeyTile::kSharedBytes == SHARED_BYTES, "kernels/attention_backward.py: another size");

// delta[t, h] = sum(dout[t, h] * out[t, h]) - dlse[t, h]: one warp per row. dlse may be null.
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_delta(const scalar_t* dout, const scalar_t* out, const float* dlse,
                             float* delta, int64_t dout_stride_t, int64_t dout_stride_h,
                             int64_t out_stride_t, int64_t out_stride_h, int64_t rows,
                             int num_heads, int head_dim) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  const int64_t token = row / num_heads, head = row % num_heads;
  const scalar_t* const a = dout + token * dout_stride_t + head * dout_stride_h;
  const scalar_t* const b = out + token * out_stride_t + head * out_stride_h;
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < head_dim; i += 32) sum += to_float(a[i]) * to_float(b[i]);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) delta[row] = dlse == nullptr ? sum : sum - dlse[row];
}

// Strides are in elements: _t between tokens, _h between heads. lse and delta are contiguous.
struct AttentionBackwardParams {
  const scalar_t* dout;     // (Tq, H, D)
  const scalar_t* q;        // (Tq, H, D)
  const scalar_t* k;        // (Tk, K, D)
  const scalar_t* v;        // (Tk, K, D)
  const float* lse;         // (Tq, H) log-sum-exp of the forward pass
  const float* delta;       // (Tq, H) computed by _delta
  const int* cu_seqlens_q;  // (B + 1,) sequence b's queries: rows cu_seqlens_q[b] to [b + 1]
  const int* cu_seqlens_k;  // (B + 1,) likewise for its keys
  scalar_t* dq;             // (Tq, H, D)
  scalar_t* dk;             // (Tk, K, D)
  scalar_t* dv;             // (Tk, K, D)
  int64_t dout_stride_t, dout_stride_h, q_stride_t, q_stride_h;
  int64_t k_stride_t, k_stride_h, v_stride_t, v_stride_h;
  int64_t dq_stride_t, dq_stride_h, dk_stride_t, dk_stride_h, dv_stride_t, dv_stride_h;
  int total_q, total_k, num_heads;
  int group;  // H / K
  int head_dim;
  int causal;
  int window;                       // 0: no window
  int is_vector;                    // rows of all inputs consist of whole, aligned 16-byte words
  float score_inner, score_factor;  // ScoreRule
  float scale;
  // See attention_pattern.cuh; zeros without a pattern.
  const unsigned* pattern_blocks;
  int pattern_words, pattern_num_q, pattern_num_k, pattern_q, pattern_k, pattern_offset;
};

__device__ __forceinline__ auto make_sequence(const AttentionBackwardParams& p, int b) {
  const Sequence sequence(p.cu_seqlens_q, p.cu_seqlens_k, b, p.total_q, p.total_k, p.causal,
                          p.window);
  if constexpr (PATTERN != 0)
    return PatternSequence(sequence, make_pattern(p));
  else
    return sequence;
}

// Rows of one head and sequence in q, dout, k and v.
__device__ __forceinline__ Rows q_rows(const AttentionBackwardParams& p, const Sequence& sequence,
                                       int head) {
  return {p.q + sequence.q_begin * p.q_stride_t + head * p.q_stride_h, p.q_stride_t, sequence.num_q,
          p.head_dim, p.is_vector != 0};
}
__device__ __forceinline__ Rows dout_rows(const AttentionBackwardParams& p,
                                          const Sequence& sequence, int head) {
  return {p.dout + sequence.q_begin * p.dout_stride_t + head * p.dout_stride_h, p.dout_stride_t,
          sequence.num_q, p.head_dim, p.is_vector != 0};
}
__device__ __forceinline__ Rows k_rows(const AttentionBackwardParams& p, const Sequence& sequence,
                                       int kv_head) {
  return {p.k + sequence.k_begin * p.k_stride_t + kv_head * p.k_stride_h, p.k_stride_t,
          sequence.num_k, p.head_dim, p.is_vector != 0};
}
__device__ __forceinline__ Rows v_rows(const AttentionBackwardParams& p, const Sequence& sequence,
                                       int kv_head) {
  return {p.v + sequence.k_begin * p.v_stride_t + kv_head * p.v_stride_h, p.v_stride_t,
          sequence.num_k, p.head_dim, p.is_vector != 0};
}

extern "C" __global__ void __launch_bounds__(KeyTile::kThreads, 1)
    attention_backward_keys(const __grid_constant__ AttentionBackwardParams p) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  constexpr int kParts = (kHeadDim + KeyTile::kColumns - 1) / KeyTile::kColumns;
  const int b = blockIdx.z, kv_head = blockIdx.y;
  const int row_begin = static_cast<int>(blockIdx.x) / kParts * KeyTile::kRows;
  const int column = static_cast<int>(blockIdx.x) % kParts * KeyTile::kColumns;
  const auto sequence = make_sequence(p, b);
  if (row_begin >= sequence.num_k) return;
  const Rows k = k_rows(p, sequence, kv_head), v = v_rows(p, sequence, kv_head);
  const int end_row = min(row_begin + KeyTile::kRows, sequence.num_k);
  const int begin = sequence.first_query(row_begin), end = sequence.end_query(end_row);
  KeyTile core;
  core.start();
#pragma unroll 1
  for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
    const int64_t stat = sequence.q_begin * p.num_heads + head;
    core.run(smem_bytes, sequence, ScoreRule{p.score_inner, p.score_factor}, k, v,
             q_rows(p, sequence, head), dout_rows(p, sequence, head), p.lse + stat, p.delta + stat,
             p.num_heads, row_begin, begin, end, column);
  }
  scalar_t* const dk = p.dk + sequence.k_begin * p.dk_stride_t + kv_head * p.dk_stride_h;
  scalar_t* const dv = p.dv + sequence.k_begin * p.dv_stride_t + kv_head * p.dv_stride_h;
  core.store(GradientRows{dk, p.dk_stride_t, sequence.num_k, p.head_dim, p.scale},
             GradientRows{dv, p.dv_stride_t, sequence.num_k, p.head_dim, 1.0f}, row_begin, column);
}

extern "C" __global__ void __launch_bounds__(QueryTile::kThreads, 1)
    attention_backward_queries(const __grid_constant__ AttentionBackwardParams p) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  const int b = blockIdx.z, head = blockIdx.y, kv_head = head / p.group;
  const int row_begin = static_cast<int>(gridDim.x - 1 - blockIdx.x) * QueryTile::kRows;
  const auto sequence = make_sequence(p, b);
  if (row_begin >= sequence.num_q) return;
  const int last_row = min(row_begin + QueryTile::kRows, sequence.num_q) - 1;
  const int begin = sequence.first_key(row_begin);
  const int end = min(sequence.last_key(last_row) + 1, sequence.num_k);
  const int64_t stat = sequence.q_begin * p.num_heads + head;
  QueryTile core;
  core.start();
  core.run(smem_bytes, sequence, ScoreRule{p.score_inner, p.score_factor},
           q_rows(p, sequence, head), dout_rows(p, sequence, head), k_rows(p, sequence, kv_head),
           v_rows(p, sequence, kv_head), p.lse + stat, p.delta + stat, p.num_heads, row_begin,
           begin, end, 0);
  const GradientRows to{p.dq + sequence.q_begin * p.dq_stride_t + head * p.dq_stride_h,
                        p.dq_stride_t, sequence.num_q, p.head_dim, p.scale};
  core.store(to, to, row_begin, 0);
}
