// Quantization to 8-bit codes with a shared scale: e4m3, or integers from -127 to 127.
//
//   code = round(x * factor),  factor = min(largest / peak, FLT_MAX),  scale = peak / largest
//
// peak is the largest magnitude among the numbers that share the scale, or NaN if one of them is
// NaN. Rounding is to nearest even with saturation. If all numbers are 0, the codes and the scale
// are 0.
// Mirror: engine/reference/quantize_rows.py
#pragma once

#include <cuda_fp8.h>

#include "common/reduce.cuh"
#include "common/types.cuh"

// Returns NaN if either operand is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

struct E4m3 {
  static constexpr float kLargest = 448.0f;
  __device__ __forceinline__ static uint32_t pair(float a, float b) {
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  }
  // Packs four codes, the first in the lowest byte.
  __device__ __forceinline__ static uint32_t pack(float a, float b, float c, float d) {
    return pair(a, b) | pair(c, d) << 16;
  }
  __device__ __forceinline__ static unsigned char one(float a) {
    return __nv_cvt_float_to_fp8(a, __NV_SATFINITE, __NV_E4M3);
  }
};

struct Int8 {
  static constexpr float kLargest = 127.0f;
  __device__ __forceinline__ static uint32_t whole(float a) {
    return static_cast<uint32_t>(max(-127, min(127, __float2int_rn(a))));  // NaN becomes 0
  }
  __device__ __forceinline__ static uint32_t pack(float a, float b, float c, float d) {
    const uint32_t low = __byte_perm(whole(a), whole(b), 0x0040);
    return __byte_perm(low, __byte_perm(whole(c), whole(d), 0x0040), 0x5410);
  }
  __device__ __forceinline__ static unsigned char one(float a) {
    return static_cast<unsigned char>(whole(a));
  }
};

template <typename Codes>
__device__ __forceinline__ float code_factor(float peak) {
  return fminf(__fdiv_rn(Codes::kLargest, peak), 3.402823466e38f);
}
template <typename Codes>
__device__ __forceinline__ float code_scale(float peak) {
  return __fdiv_rn(peak, Codes::kLargest);
}

template <int kWidth>
__device__ __forceinline__ float peak_of(const Vec<scalar_t, kWidth>& x, float peak) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) peak = max_or_nan(peak, fabsf(to_float(x.v[j])));
  return peak;
}

// Maximum over kLanes neighbouring lanes; NaN if one of them holds NaN.
template <int kLanes>
__device__ __forceinline__ float lanes_max_or_nan(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    x = max_or_nan(x, __shfl_xor_sync(kFullMask, x, offset));
  return x;
}

// Quantizes kWidth numbers and stores their codes in one access; `to` must be aligned to kWidth
// bytes.
template <typename Codes, int kWidth>
__device__ __forceinline__ void store_codes(unsigned char* to, const Vec<scalar_t, kWidth>& x,
                                            float factor) {
  if constexpr (kWidth == 1) {
    *to = Codes::one(to_float(x.v[0]) * factor);
  } else {
    Vec<uint32_t, kWidth / 4> codes;
#pragma unroll
    for (int j = 0; j < kWidth / 4; ++j)
      codes.v[j] =
          Codes::pack(to_float(x.v[4 * j]) * factor, to_float(x.v[4 * j + 1]) * factor,
                      to_float(x.v[4 * j + 2]) * factor, to_float(x.v[4 * j + 3]) * factor);
    store_vec(reinterpret_cast<uint32_t*>(to), codes);
  }
}

// Converts four e4m3 codes to two pairs of __half, exactly. Before sm_89 a NaN code becomes 480.
__device__ __forceinline__ void halves_of_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  const auto halves = [](uint32_t t) {  // `t` holds a code in the upper byte of each half
    const uint32_t bits = (t & 0x80008000u) | ((t & 0x7f007f00u) >> 1);
    const __half2 x = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.0f));
    return *reinterpret_cast<const uint32_t*>(&x);
  };
  low = halves(__byte_perm(codes, 0, 0x1404));
  high = halves(__byte_perm(codes, 0, 0x3424));
#endif
}
