// Attention of e4m3 Q, K and V, in plain arithmetic: right everywhere, fast nowhere.
//
//   out = softmax(scale * Q K^T * q_scale k_scale + mask) V * v_scale   for every sequence, head
//
//   q        (Tq, H, D)  e4m3     token t, head h starts at t * q_stride_t + h * q_stride_h
//   k, v     (Tk, K, D)  e4m3     query head h reads head h / group
//   q_scale  (H,)        float    k_scale, v_scale (K,) float
//   cu_seqlens_q, cu_seqlens_k (B + 1,) int   where sequences begin
//   out      (Tq, H, D)  scalar_t; 0 where a query sees no key
//   lse      (Tq, H)     float, or null
//   factor   scale * log2(e)
//
// Numerics: sums in float. P = 2^(score * log2(e) - n), with a whole number n for each row that
// makes the largest P at most 16, is rounded to e4m3; the sum by which the result is divided is
// that of the rounded P. Whole numbers move P's exponent only, so the result hardly depends on n.
// Parallelisation: a warp a row, 32 keys at a time: a lane a key for the scores, then D / 32
// columns a lane for the products. A test of the fast kernel on Hopper, and what other chips run.
// TODO(issue 5): sm_89 and sm_120 have mma for e4m3.
// Mirror: engine/reference/attention_prefill_fp8.py
#include <cuda_fp8.h>

#include "common/attention.cuh"

constexpr int kRows = 4, kMaxColumns = 8;  // D <= 256

// The bits of a half with the same sign, exponent and mantissa are worth 2^-8 of an e4m3.
__device__ __forceinline__ float from_e4m3(unsigned char code) {
  if ((code & 0x7F) == 0x7F) return __int_as_float(0x7FC00000);
  return 256.0f * __half2float(__ushort_as_half((code & 0x80) << 8 | (code & 0x7F) << 7));
}

__device__ __forceinline__ float round_to_e4m3(float x) {
  return from_e4m3(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
}

// Sequence `b` of the rows of an array of `total`: cut to it, whatever the lengths say.
__device__ __forceinline__ int2 span(const int* cu_seqlens, int b, int64_t total) {
  const int64_t begin = min(static_cast<int64_t>(max(cu_seqlens[b], 0)), total);
  const int64_t end = min(max(static_cast<int64_t>(cu_seqlens[b + 1]), begin), total);
  return make_int2(static_cast<int>(begin), static_cast<int>(end));
}

extern "C" __global__ void __launch_bounds__(32 * kRows)
    attention_prefill_fp8(const unsigned char* q, const unsigned char* k, const unsigned char* v,
                          const int* cu_seqlens_q, const int* cu_seqlens_k, const float* q_scale,
                          const float* k_scale, const float* v_scale, scalar_t* out, float* lse,
                          int64_t q_stride_t, int64_t q_stride_h, int64_t k_stride_t,
                          int64_t k_stride_h, int64_t v_stride_t, int64_t v_stride_h,
                          int64_t out_stride_t, int64_t out_stride_h, int64_t max_keys, int total_q,
                          int num_heads, int group, int head_dim, int causal, float factor) {
  __shared__ float smem_q[kRows][32 * kMaxColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int h = blockIdx.y, kv_head = h / group;
  const int2 rows = span(cu_seqlens_q, blockIdx.z, total_q);
  const int2 keys = span(cu_seqlens_k, blockIdx.z, max_keys);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + warp + rows.x;
  if (row >= rows.y) return;
  for (int i = lane; i < head_dim; i += 32)
    smem_q[warp][i] = from_e4m3(q[row * q_stride_t + h * q_stride_h + i]);
  __syncwarp();

  const int num_keys = keys.y - keys.x;
  const int last = causal ? num_keys - rows.y + static_cast<int>(row) : num_keys - 1;
  const float to_log2 = factor * q_scale[h] * k_scale[kv_head];
  float base = -kInf, sum = 0.0f, acc[kMaxColumns] = {};
  for (int first = 0; first <= last; first += 32) {
    const int key = first + lane;
    float score = -kInf;
    if (key <= last) {
      const unsigned char* const x = k + (keys.x + key) * k_stride_t + kv_head * k_stride_h;
      float dot = 0.0f;
      for (int i = 0; i < head_dim; ++i) dot = fmaf(smem_q[warp][i], from_e4m3(x[i]), dot);
      score = dot * to_log2;
    }
    const float top = fmaxf(base, ceilf(warp_max(score)));
    const float correction = exp2f(base - finite_or_zero(top));
    base = top;
    const float p = round_to_e4m3(exp2f(score - finite_or_zero(base) + 4.0f));
    sum = fmaf(sum, correction, warp_sum(p));
#pragma unroll
    for (int j = 0; j < kMaxColumns; ++j) acc[j] *= correction;
    for (int i = 0; i < 32 && first + i <= last; ++i) {
      const float weight = __shfl_sync(~0u, p, i);
      const unsigned char* const x = v + (keys.x + first + i) * v_stride_t + kv_head * v_stride_h;
#pragma unroll
      for (int j = 0; j < kMaxColumns; ++j)
        if (lane + 32 * j < head_dim) acc[j] = fmaf(weight, from_e4m3(x[lane + 32 * j]), acc[j]);
    }
  }
  const float inverse = sum == 0.0f ? 0.0f : v_scale[kv_head] / sum;
#pragma unroll
  for (int j = 0; j < kMaxColumns; ++j)
    if (lane + 32 * j < head_dim)
      out[row * out_stride_t + h * out_stride_h + lane + 32 * j] =
          from_float<scalar_t>(acc[j] * inverse);
  if (lse != nullptr && lane == 0)
    lse[row * num_heads + h] = sum == 0.0f ? -kInf : (base - 4.0f + log2f(sum)) * kLn2;
}
