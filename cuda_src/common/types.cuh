// scalar_t (the dtype that a file is compiled for), its conversions to and from float, and vectors.
//
// The loader defines ENGINE_DTYPE: 0 float, 1 __half, 2 __nv_bfloat16; without it scalar_t is
// float. Arithmetic is always in float; scalar_t is only the storage type. Rounding is to nearest
// even, as NumPy and ml_dtypes do. INFINITY and the fixed-width integers, which NVRTC lacks, are
// C's.
//
// Public: sm_80 up.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef ENGINE_DTYPE
#define ENGINE_DTYPE 0
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// The architecture compiled for: 800 for sm_80, 900 for sm_90a. In host code 0.
#ifdef __CUDA_ARCH__
constexpr int kArch = __CUDA_ARCH__;
#else
constexpr int kArch = 0;
#endif

// Integers of fixed width.
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

// The dtype that the file is compiled for.
#if ENGINE_DTYPE == 0
using scalar_t = float;
#elif ENGINE_DTYPE == 1
using scalar_t = __half;
#else
using scalar_t = __nv_bfloat16;
#endif

// Converts to float, exactly.
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds to T: float, __half or __nv_bfloat16.
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// x rounded to scalar_t: a fused kernel rounds wherever separate kernels would have stored and
// reloaded the value.
__device__ __forceinline__ float round_to_scalar(float x) {
  return to_float(from_float<scalar_t>(x));
}

// NaN.
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7fffffff); }

// Packs two floats, rounded, into one register of T values (__half or __nv_bfloat16), `low` in the
// lower half: turns accumulators into an operand fragment.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// N values moved in one access of up to 16 bytes; the address must be aligned to the access size.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

// Bytes of the widest access, and elements of scalar_t in it.
constexpr int kVecBytes = 16;
constexpr int kVec = kVecBytes / sizeof(scalar_t);

// Loads or stores N values in one access of N * sizeof(T) bytes, at most 16; `p` must be aligned to
// that many bytes.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <typename T, int N>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& x) {
  *reinterpret_cast<Vec<T, N>*>(p) = x;
}
