// Arithmetic on two 16-bit numbers (half or bfloat16) per register, and integer conversion.
//
// An integer q of up to 7 bits is or-ed into the mantissa of a power of two, which yields exactly
// kMagic + q: 0x4300 | q is 128 + q in bfloat16, 0x6400 | q is 1024 + q in float16.
#pragma once

#include "common/types.cuh"

// (a & kMask) | kOr in one instruction; given two constants, the compiler emits two.
template <uint32_t kMask, uint32_t kOr>
__device__ __forceinline__ uint32_t and_or(uint32_t a) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(d) : "r"(a), "n"(kMask), "n"(kOr));
  return d;
}

#if ENGINE_DTYPE != 0

constexpr bool kIsHalf = ENGINE_DTYPE == 1;
constexpr uint32_t kMagicWord = kIsHalf ? 0x64006400u : 0x43004300u;
constexpr int kMagic = kIsHalf ? 1024 : 128;

// A register holding two copies of an integer that is exact in scalar_t. constexpr because the
// compiler does not fold the conversions of CUDA's headers.
constexpr uint32_t pair_of(int value) {
  if (value == 0) return 0;
  const int mantissa_bits = kIsHalf ? 10 : 7, bias = kIsHalf ? 15 : 127;
  const uint32_t magnitude = value < 0 ? -value : value;
  int exponent = 0;
  while (magnitude >> (exponent + 1) != 0) ++exponent;
  const uint32_t mantissa = exponent > mantissa_bits ? magnitude >> (exponent - mantissa_bits)
                                                     : magnitude << (mantissa_bits - exponent);
  const uint32_t rest = mantissa & ((1u << mantissa_bits) - 1);
  const uint32_t bits = (value < 0 ? 0x8000u : 0) | (exponent + bias) << mantissa_bits | rest;
  return bits * 0x00010001u;
}
static_assert(pair_of(1) == (kIsHalf ? 0x3c003c00u : 0x3f803f80u), "1");
static_assert(pair_of(-136) == (kIsHalf ? 0xd840d840u : 0xc308c308u), "-136");

__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
#if ENGINE_DTYPE == 1
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
  return d;
}
// Adds a small integer to both numbers.
template <int kValue>
__device__ __forceinline__ uint32_t add_to_pair(uint32_t a) {
  return fma_pair(a, pair_of(1), pair_of(kValue));
}
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  return fma_pair(a, b, 0x80008000u);
}

// Converts bytes 0 and 2 of a word, as signed integers.
__device__ __forceinline__ uint32_t signed_bytes(uint32_t word) {
  if constexpr (kIsHalf) {
    const uint32_t biased = and_or<0x00ff00ffu, kMagicWord>(word ^ 0x00800080u);
    return add_to_pair<-1152>(biased);
  } else {  // (128 + lower seven bits) - (128, or 256 for a negative code)
    const uint32_t low = and_or<0x007f007fu, kMagicWord>(word);
    const uint32_t base = and_or<0x00800080u, kMagicWord>(word);
    return fma_pair(base, pair_of(-1), low);
  }
}

#endif
