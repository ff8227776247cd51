// Attention with e4m3 Q, K and V in plain float arithmetic: portable and slow.
//
//   out = softmax(scale * Q K^T * q_scale k_scale + mask) V * v_scale   for every sequence, head
//
// Arguments: AttentionPrefillFp8Params, below.
//
// Numerics: sums are in float. P = 2^(score * log2(e) - n) is rounded to e4m3, with an integer n
// per row such that the largest P is at most 16; the result is divided by the sum of the rounded P.
// As an integer n shifts only P's exponent, the result hardly depends on n.
// Parallelisation: one warp per row, 32 keys at a time: one lane per key for the scores, then D /
// 32 columns per lane for P V. It is the reference for checking the Hopper kernel, and the kernel
// of all other chips.
// TODO(issue 5): use the e4m3 mma of sm_89 and sm_120.
// Mirror: engine/reference/attention_prefill_fp8.py
#include <cuda_fp8.h>

#include "common/attention.cuh"

constexpr int kRows = 4, kMaxColumns = 8;  // D <= 256

// A half with the sign, exponent and mantissa bits of an e4m3 code has 2^-8 times its value.
__device__ __forceinline__ float from_e4m3(unsigned char code) {
  if ((code & 0x7F) == 0x7F) return __int_as_float(0x7FC00000);
  return 256.0f * __half2float(__ushort_as_half((code & 0x80) << 8 | (code & 0x7F) << 7));
}

__device__ __forceinline__ float round_to_e4m3(float x) {
  return from_e4m3(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
}

// Returns [begin, end) of sequence b's rows. SAFETY: clamped to the array's `total` rows.
__device__ __forceinline__ int2 span(const int* cu_seqlens, int b, int64_t total) {
  const int64_t begin = min(static_cast<int64_t>(max(cu_seqlens[b], 0)), total);
  const int64_t end = min(max(static_cast<int64_t>(cu_seqlens[b + 1]), begin), total);
  return make_int2(static_cast<int>(begin), static_cast<int>(end));
}

// Strides are in elements: _t between tokens, _h between heads.
struct AttentionPrefillFp8Params {
  const unsigned char* q;   // (Tq, H, D) e4m3
  const unsigned char* k;   // (Tk, K, D) e4m3; query head h reads head h / group
  const unsigned char* v;   // (Tk, K, D) e4m3
  const int* cu_seqlens_q;  // (B + 1,) sequence b's queries: rows cu_seqlens_q[b] to [b + 1]
  const int* cu_seqlens_k;  // (B + 1,) likewise for its keys
  const float* q_scale;     // (H,)
  const float* k_scale;     // (K,)
  const float* v_scale;     // (K,)
  scalar_t* out;            // (Tq, H, D); 0 for queries that see no key
  float* lse;               // (Tq, H) contiguous, or null
  int64_t q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h;
  int64_t out_stride_t, out_stride_h;
  int64_t max_keys;  // Tk
  int total_q, num_heads;
  int group;  // H / K
  int head_dim;
  int causal;
  float factor;  // scale * log2(e)
};

extern "C" __global__ void __launch_bounds__(32 * kRows)
    attention_prefill_fp8(const __grid_constant__ AttentionPrefillFp8Params p) {
  __shared__ float smem_q[kRows][32 * kMaxColumns];
  const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
  const int h = blockIdx.y, kv_head = h / p.group;
  const int2 rows = span(p.cu_seqlens_q, blockIdx.z, p.total_q);
  const int2 keys = span(p.cu_seqlens_k, blockIdx.z, p.max_keys);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + warp_idx + rows.x;
  if (row >= rows.y) return;
  for (int i = lane_idx; i < p.head_dim; i += 32)
    smem_q[warp_idx][i] = from_e4m3(p.q[row * p.q_stride_t + h * p.q_stride_h + i]);
  __syncwarp();

  const int num_keys = keys.y - keys.x;
  const int last = p.causal ? num_keys - rows.y + static_cast<int>(row) : num_keys - 1;
  const float to_log2 = p.factor * p.q_scale[h] * p.k_scale[kv_head];
  float base = -kInf, sum = 0.0f, acc[kMaxColumns] = {};
  for (int first = 0; first <= last; first += 32) {
    const int key = first + lane_idx;
    float score = -kInf;
    if (key <= last) {
      const unsigned char* const x = p.k + (keys.x + key) * p.k_stride_t + kv_head * p.k_stride_h;
      float dot = 0.0f;
      for (int i = 0; i < p.head_dim; ++i) dot = fmaf(smem_q[warp_idx][i], from_e4m3(x[i]), dot);
      score = dot * to_log2;
    }
    const float top = fmaxf(base, ceilf(warp_max(score)));
    const float rescale = exp2f(base - finite_or_zero(top));
    base = top;
    const float prob = round_to_e4m3(exp2f(score - finite_or_zero(base) + 4.0f));
    sum = fmaf(sum, rescale, warp_sum(prob));
#pragma unroll
    for (int j = 0; j < kMaxColumns; ++j) acc[j] *= rescale;
    for (int i = 0; i < 32 && first + i <= last; ++i) {
      const float weight = __shfl_sync(~0u, prob, i);
      const unsigned char* const x =
          p.v + (keys.x + first + i) * p.v_stride_t + kv_head * p.v_stride_h;
#pragma unroll
      for (int j = 0; j < kMaxColumns; ++j)
        if (lane_idx + 32 * j < p.head_dim)
          acc[j] = fmaf(weight, from_e4m3(x[lane_idx + 32 * j]), acc[j]);
    }
  }
  const float inverse = sum == 0.0f ? 0.0f : p.v_scale[kv_head] / sum;
#pragma unroll
  for (int j = 0; j < kMaxColumns; ++j)
    if (lane_idx + 32 * j < p.head_dim)
      p.out[row * p.out_stride_t + h * p.out_stride_h + lane_idx + 32 * j] =
          from_float<scalar_t>(acc[j] * inverse);
  if (p.lse != nullptr && lane_idx == 0)
    p.lse[row * p.num_heads + h] = sum == 0.0f ? -kInf : (base - 4.0f + log2f(sum)) * kLn2;
}
