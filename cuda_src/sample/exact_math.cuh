// log2 and 2^x, bit for bit equal to engine/reference/_exact_math.py.
//
// Every operation is an _rn intrinsic: rounded once, and never contracted to a fused multiply-add,
// which NumPy does not use. The coefficients are the mirror's.
#pragma once

#include "common/types.cuh"

constexpr int kMassBits = 40;  // a mass is an integer number of steps of 2^-40

template <int kTerms>
__device__ __forceinline__ float horner(const float (&coefficients)[kTerms], float t) {
  float value = coefficients[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) value = __fadd_rn(__fmul_rn(value, t), coefficients[i]);
  return value;
}

// log2(1 + t) for t in [sqrt(1/2) - 1, sqrt(2) - 1].
__device__ __forceinline__ float log2_one_plus(float t) {
  constexpr float kLog2[] = {1.442694902420044f,   -0.7213528156280518f, 0.48092323541641235f,
                             -0.3602396249771118f, 0.2870987057685852f,  -0.2488768845796585f,
                             0.23404230177402496f, -0.1458115130662918f};
  return __fmul_rn(t, horner(kLog2, t));
}

// log2(y) for positive, normal y.
__device__ __forceinline__ float exact_log2(float y) {
  const uint32_t bits = __float_as_uint(y);
  const int exponent = static_cast<int>(bits - 0x3f3504f3u) >> 23;
  const float mantissa = __uint_as_float(bits - (static_cast<uint32_t>(exponent) << 23));
  return __fadd_rn(__int2float_rn(exponent), log2_one_plus(__fsub_rn(mantissa, 1.0f)));
}

// Rounding down, for |x| < 2^21: the low bits of x + 1.5 * 2^23 are the integer. Additions are
// faster than conversions, which run on the special function unit.
constexpr float kRoundingPoint = 12582912.0f;
__device__ __forceinline__ int round_down(float x) {
  const float moved = __fadd_rd(x, kRoundingPoint);
  return __float_as_int(moved) - __float_as_int(kRoundingPoint);
}

// 2^x for x <= 0 as a number of steps of 2^-40, rounded down; 0 if x < -40.
__device__ __forceinline__ uint64_t mass(float x) {
  constexpr float kExp2[] = {0.6931471824645996f,    0.2402271330356598f,
                             0.055496569722890854f,  0.009650635533034801f,
                             0.0012710212031379342f, 0.00020745005167555064f};
  if (!(x >= -kMassBits)) return 0;
  const float moved = __fadd_rd(x, kRoundingPoint);
  const float f = __fsub_rn(x, __fsub_rn(moved, kRoundingPoint));
  const float power = fminf(__fadd_rn(1.0f, __fmul_rn(f, horner(kExp2, f))), 1.9999999f);
  const uint64_t significand = (__float_as_uint(power) & 0x7fffffu) | 0x800000u;
  const int shift = __float_as_int(kRoundingPoint) - __float_as_int(moved);
  return (significand << (kMassBits - 23)) >> shift;
}

// ceil(share * total) for a share in steps of 2^-24 and a total of at most 2^62.
__device__ __forceinline__ uint64_t share_of(uint64_t total, uint32_t steps) {
  const uint64_t low = (total & 0xffffffu) * steps + 0xffffffu;
  return (total >> 24) * steps + (low >> 24);
}

// Maps a float to a uint32 that compares like it; -0 and 0 share a key.
__device__ __forceinline__ uint32_t ordered_key(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float from_ordered_key(uint32_t key) {
  return __uint_as_float(key ^ ((key >> 31) ? 0x80000000u : 0xffffffffu));
}
