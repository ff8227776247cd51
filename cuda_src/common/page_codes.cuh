// What pages of keys and values hold: scalar_t or, with PAGE_CODES, e4m3 codes of one byte with a
// float scale for each key/value head: value = code * scale.
#pragma once

#include "common/types.cuh"

#ifndef PAGE_CODES
#define PAGE_CODES 0
#endif

constexpr bool kHasCodes = PAGE_CODES;

#if PAGE_CODES
#include <cuda_fp8.h>
using page_t = unsigned char;

// x / scale, saturated and rounded to nearest even; NaN stays NaN.
template <int N>
__device__ __forceinline__ Vec<page_t, N> to_page(const float* x, float scale) {
  Vec<page_t, N> codes;
#pragma unroll
  for (int i = 0; i < N; ++i)
    codes.v[i] = __nv_cvt_float_to_fp8(__fdiv_rn(x[i], scale), __NV_SATFINITE, __NV_E4M3);
  return codes;
}

// Two codes as halves, the lower byte first: exact.
__device__ __forceinline__ __half2 codes_to_half2(unsigned short codes) {
  return __half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3));
}

// Codes as scalar_t, without their scale: exact.
template <int N>
__device__ __forceinline__ Vec<scalar_t, N> codes_to_scalars(const Vec<page_t, N>& codes) {
  Vec<scalar_t, N> x;
  if constexpr (N == 1) {
    x.v[0] = from_float<scalar_t>(__low2float(codes_to_half2(codes.v[0])));
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const __half2 pair = codes_to_half2(codes.v[i] | codes.v[i + 1] << 8);
      x.v[i] = from_float<scalar_t>(__low2float(pair));
      x.v[i + 1] = from_float<scalar_t>(__high2float(pair));
    }
  }
  return x;
}
#else
using page_t = scalar_t;

template <int N>
__device__ __forceinline__ Vec<page_t, N> to_page(const float* x, float) {
  Vec<page_t, N> y;
#pragma unroll
  for (int i = 0; i < N; ++i) y.v[i] = from_float<scalar_t>(x[i]);
  return y;
}
#endif

constexpr int kPageVec = kVecBytes / sizeof(page_t);  // elements in one 16-byte access
