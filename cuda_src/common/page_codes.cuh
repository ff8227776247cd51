// Element type of the KV cache: scalar_t or, if PAGE_CODES is set, one-byte codes with a float
// scale per key/value head: value = code * scale. PAGE_CODES = 1: e4m3; 2: integers from -127 to
// 127. All code that depends on the code type is here.
#pragma once

#include "common/types.cuh"

#ifndef PAGE_CODES
#define PAGE_CODES 0
#endif

constexpr bool kHasCodes = PAGE_CODES;

#if PAGE_CODES == 2
// Subtracts 1152 = 1024 + 128: a half with bits 0x6400 + u is 1024 + u, and the byte u is code +
// 128.
__device__ __forceinline__ uint32_t half2_less_1152(uint32_t pair) {
  const __half2 bias = __half2half2(__ushort_as_half(0x6480));
  const __half2 x = __hsub2(*reinterpret_cast<const __half2*>(&pair), bias);
  return *reinterpret_cast<const uint32_t*>(&x);
}

// Exact conversion of four codes to halves: `low` holds bytes 0 and 1, `high` bytes 2 and 3.
__device__ __forceinline__ void codes_to_halves(uint32_t codes, uint32_t& low, uint32_t& high) {
  const uint32_t bytes = codes ^ 0x80808080u;
  low = half2_less_1152(__byte_perm(bytes, 0x64646464u, 0x4140));
  high = half2_less_1152(__byte_perm(bytes, 0x64646464u, 0x4342));
}

// Exact conversion of four codes to halves: `even` holds bytes 0 and 2, `odd` bytes 1 and 3.
__device__ __forceinline__ void codes_to_even_odd(uint32_t codes, uint32_t& even, uint32_t& odd) {
  const uint32_t bytes = codes ^ 0x80808080u;
  even = half2_less_1152(__byte_perm(bytes, 0x64646464u, 0x4240));
  odd = half2_less_1152(__byte_perm(bytes, 0x64646464u, 0x4341));
}
#else  // e4m3; also compiled, but not called, without PAGE_CODES
// Exact conversion of four codes to halves: `low` holds bytes 0 and 1, `high` bytes 2 and 3.
__device__ __forceinline__ void codes_to_halves(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

// Exact conversion of four codes to halves: `even` holds bytes 0 and 2, `odd` bytes 1 and 3.
__device__ __forceinline__ void codes_to_even_odd(uint32_t codes, uint32_t& even, uint32_t& odd) {
  codes_to_halves(__byte_perm(codes, 0, 0x3120), even, odd);
}
#endif

// Exact conversion of four codes to two registers of scalar_t, a 16-bit type.
__device__ __forceinline__ void codes_to_registers(uint32_t codes, uint32_t& low, uint32_t& high) {
  codes_to_halves(codes, low, high);
#if ENGINE_DTYPE == 2
  const auto widened = [](uint32_t pair) {
    const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    return pack2<scalar_t>(x.x, x.y);
  };
  low = widened(low);
  high = widened(high);
#endif
}

#if PAGE_CODES
#include "common/codes.cuh"
using page_t = unsigned char;
#if PAGE_CODES == 1
using PageCodes = E4m3;
#else
using PageCodes = Int8;
#endif

// Quantizes x / scale, rounded to nearest even with saturation. NaN stays NaN in e4m3 and becomes 0
// as an integer.
template <int N>
__device__ __forceinline__ Vec<page_t, N> to_page(const float* x, float scale) {
  Vec<page_t, N> codes;
#pragma unroll
  for (int i = 0; i < N; ++i) codes.v[i] = PageCodes::one(__fdiv_rn(x[i], scale));
  return codes;
}

#if PAGE_CODES == 1
// Exact conversion of two codes to halves, the lower byte in the lower half.
__device__ __forceinline__ __half2 codes_to_half2(unsigned short codes) {
  return __half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3));
}

// Exact conversion of codes to scalar_t; the scale is not applied.
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
// Exact conversion of codes to scalar_t; the scale is not applied.
template <int N>
__device__ __forceinline__ Vec<scalar_t, N> codes_to_scalars(const Vec<page_t, N>& codes) {
  Vec<scalar_t, N> x;
  if constexpr (sizeof(scalar_t) == 2 && N % 4 == 0) {
    uint32_t pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      codes_to_registers(reinterpret_cast<const uint32_t*>(codes.v)[i], pairs[2 * i],
                         pairs[2 * i + 1]);
    }
    x = *reinterpret_cast<const Vec<scalar_t, N>*>(pairs);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      x.v[i] = from_float<scalar_t>(static_cast<float>(static_cast<signed char>(codes.v[i])));
  }
  return x;
}
#endif
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
