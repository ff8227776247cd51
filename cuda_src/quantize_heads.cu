// Quantizes each head to e4m3 with one scale: x ~ codes * scale.
//
//   scale[h] = max |y[:, h]| / 448        (1 if all are 0)
//   codes    = e4m3(y / scale)            y = x - offset, then rotated if requested
//
//   x       (T, H, D)  scalar_t   token t, head h starts at t * stride_t + h * stride_h
//   offset  (H, D)     float      subtracted from every token, or null
//   codes   (T, H, D)  e4m3, contiguous
//   scale   (H,)       float
//   peaks   (H,)       uint, zero at launch: bits of max |y|
//
// The rotation multiplies by the Hadamard matrix / sqrt(D), which is its own inverse: it spreads an
// outlier column over all columns and preserves the dot product of two rotated rows. D must be a
// power of 2.
//
// Numerics: float; a code is rounded once, to nearest even. The maximum is independent of the order
// of atomics, so results are reproducible.
// Parallelisation: one warp per row of a head, in two launches: the maxima (one atomic per block),
// then the codes. Lane l holds columns l, l + 32, ...: the rotation's strides below 32 are
// shuffles.
// Mirror: engine/reference/quantize_heads.py
#include <cuda_fp8.h>

#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kMaxColumns = 8;  // columns per lane: D <= 256
constexpr int kWarps = 8;
constexpr float kLargest = 448.0f;  // largest finite e4m3 value

struct Rows {
  const scalar_t* x;
  const float* offset;  // (H, D), or null
  int64_t stride_t, stride_h;
  int num_tokens, num_heads, head_dim, rotate;
};

// Loads the lane's columns of row t of head h; columns past the row's end are 0.
template <int kColumns>
__device__ __forceinline__ void load_row(const Rows& rows, int64_t t, int h, int lane_idx,
                                         float (&y)[kColumns]) {
  const scalar_t* const row = rows.x + t * rows.stride_t + h * rows.stride_h;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const int column = lane_idx + 32 * j;
    y[j] = 0.0f;
    if (column >= rows.head_dim) continue;
    y[j] = to_float(row[column]);
    if (rows.offset != nullptr) y[j] -= rows.offset[h * rows.head_dim + column];
  }
  if (!rows.rotate) return;
  for (int step = 1; step < min(rows.head_dim, 32); step *= 2)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float other = __shfl_xor_sync(kFullMask, y[j], step);
      y[j] = lane_idx & step ? other - y[j] : y[j] + other;
    }
#pragma unroll
  for (int step = 1; step < kColumns; step *= 2)
    if (32 * step < rows.head_dim)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        if (!(j & step) && (j | step) < kColumns) {
          const float a = y[j], b = y[j | step];
          y[j] = a + b;
          y[j | step] = a - b;
        }
  const float norm = 1.0f / sqrtf(static_cast<float>(rows.head_dim));
#pragma unroll
  for (int j = 0; j < kColumns; ++j) y[j] *= norm;
}

// Computes the largest |y| of each head.
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    quantize_heads_peaks(const scalar_t* x, const float* offset, unsigned* peaks, int64_t stride_t,
                         int64_t stride_h, int num_tokens, int num_heads, int head_dim,
                         int rotate) {
  __shared__ float smem_peaks[kWarps];
  const Rows rows{x, offset, stride_t, stride_h, num_tokens, num_heads, head_dim, rotate};
  const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32, h = blockIdx.y;
  float peak = 0.0f;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + warp_idx; t < num_tokens;
       t += static_cast<int64_t>(gridDim.x) * kWarps) {
    float y[kMaxColumns];
    load_row(rows, t, h, lane_idx, y);
#pragma unroll
    for (int j = 0; j < kMaxColumns; ++j) peak = fmaxf(peak, fabsf(y[j]));
  }
  peak = warp_max(peak);
  if (lane_idx == 0) smem_peaks[warp_idx] = peak;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 1; i < kWarps; ++i) peak = fmaxf(peak, smem_peaks[i]);
  atomicMax(peaks + h,
            __float_as_uint(peak));  // bits of non-negative floats order like the floats
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    quantize_heads_codes(const scalar_t* x, const float* offset, const unsigned* peaks,
                         unsigned char* codes, float* scale, int64_t stride_t, int64_t stride_h,
                         int num_tokens, int num_heads, int head_dim, int rotate) {
  const Rows rows{x, offset, stride_t, stride_h, num_tokens, num_heads, head_dim, rotate};
  const int lane_idx = threadIdx.x % 32, h = blockIdx.y;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const float peak = __uint_as_float(peaks[h]);
  const float step = peak == 0.0f ? 1.0f : peak / kLargest;
  if (t == 0 && lane_idx == 0) scale[h] = step;
  if (t >= num_tokens) return;
  float y[kMaxColumns];
  load_row(rows, t, h, lane_idx, y);
  unsigned char* const to = codes + (t * num_heads + h) * head_dim;
#pragma unroll
  for (int j = 0; j < kMaxColumns; ++j)
    if (lane_idx + 32 * j < head_dim)
      to[lane_idx + 32 * j] = __nv_cvt_float_to_fp8(y[j] / step, __NV_SATFINITE, __NV_E4M3);
}
