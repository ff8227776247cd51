// From stored codes to the first operand of mma.sync and wgmma: registers of two 16-bit numbers.
//
// A lane's words of a tile of 16 rows by 64 columns (engine/quantization/packing.py) are the codes
// of its fragments, step by step of 16 columns: register j of a step has row g + 8 (j % 2) and
// columns 2t, 2t + 1, plus 8 if j >= 2 (lane 4 g + t), the first column in the lower half.
//
// An integer q of up to 7 bits is or-ed into the mantissa of a power of two, which gives exactly
// kMagic + q: 0x4300 | q is 128 + q in bfloat16, 0x6400 | q is 1024 + q in float16. `decode_biased`
// leaves it at that, and the caller corrects sums by kCodeBias times the sum of the other operand;
// `decode` subtracts, which is exact too. All results are exact in both dtypes.
#pragma once

#include "common/weight_format.cuh"

// A lane's words of a tile.
struct TileWords {
  uint32_t data[kBits == 8 ? 8 : 4];
  uint32_t high[kBits == 5 ? 1 : 2];  // unused with 4 and 8 bits

  // From the tile's planes in global or shared memory.
  __device__ __forceinline__ void load(const unsigned char* data_tile,
                                       const unsigned char* high_tile, int lane_idx) {
#pragma unroll
    for (int i = 0; i < kDataBytes / 512; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(data_tile + i * 512 + lane_idx * 16);
      data[4 * i] = v.x, data[4 * i + 1] = v.y, data[4 * i + 2] = v.z, data[4 * i + 3] = v.w;
    }
    if constexpr (kBits == 5)
      high[0] = *reinterpret_cast<const uint32_t*>(high_tile + lane_idx * 4);
    if constexpr (kBits == 6) {
      const uint2 v = *reinterpret_cast<const uint2*>(high_tile + lane_idx * 8);
      high[0] = v.x, high[1] = v.y;
    }
  }
};

// (a & kMask) | kOr in one instruction, which the compiler does not make of two constants.
template <uint32_t kMask, uint32_t kOr>
__device__ __forceinline__ uint32_t and_or(uint32_t a) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(d) : "r"(a), "n"(kMask), "n"(kOr));
  return d;
}

// x shifted to the right by kShift bits, or to the left if it is negative.
template <int kShift>
__device__ __forceinline__ uint32_t shifted(uint32_t x) {
  if constexpr (kShift < 0)
    return x << -kShift;
  else
    return x >> kShift;
}

#if ENGINE_DTYPE != 0

constexpr bool kIsHalf = ENGINE_DTYPE == 1;
constexpr uint32_t kMagicWord = kIsHalf ? 0x64006400u : 0x43004300u;
constexpr int kMagic = kIsHalf ? 1024 : 128;
// What decode_biased adds to a code: only to unsigned integers.
constexpr int kCodeBias = kIsE2m1 || kBits == 8 ? 0 : kMagic;

// Whether a product corrects its sums by the sum of x. Short groups subtract in the codes: that
// takes fewer instructions.
constexpr bool kSumsX = kIsPaired || (kCodeBias != 0 && kGroup > 16);
constexpr int kBias = kCodeBias + kZero;

// Two equal 16-bit numbers in a register: an integer that scalar_t has exactly. A constant: the
// conversions of CUDA's headers are not folded.
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

// Register j of step s: two codes plus kCodeBias (signed bytes and floats as they are).
template <int s, int j>
__device__ __forceinline__ uint32_t decode_register(const TileWords& w) {
  if constexpr (kIsE2m1) {
    // The code's sign, exponent and mantissa at the places of scalar_t's, whose exponent of 0 is
    // 2^(1 - bias): multiplied by 2^(bias - 1), subnormal codes become right too.
    constexpr int kPlace = kIsHalf ? 3 : 6;  // bits below the code's, when its sign is the first
    constexpr uint32_t kMask = (0x7000u >> kPlace) * 0x00010001u;
    const uint32_t sign = shifted<4 * j - 12>(w.data[s]) & 0x80008000u;
    const uint32_t pair = (shifted<4 * j - 12 + kPlace>(w.data[s]) & kMask) | sign;
    return multiply_pair(pair, kIsHalf ? 0x74007400u : 0x7e807e80u);
  } else if constexpr (kBits == 8) {
    const uint32_t word = shifted<8 * (j % 2)>(w.data[2 * s + j / 2]);
    if constexpr (kIsHalf) {
      const uint32_t biased = and_or<0x00ff00ffu, kMagicWord>(word ^ 0x00800080u);
      return add_to_pair<-1152>(biased);
    } else {  // 128 + the lower seven bits, less 128 or, for a negative code, 256
      const uint32_t low = and_or<0x007f007fu, kMagicWord>(word);
      const uint32_t base = and_or<0x00800080u, kMagicWord>(word);
      return fma_pair(base, pair_of(-1), low);
    }
  } else {
    uint32_t pair = and_or<0x000f000fu, kMagicWord>(shifted<4 * j>(w.data[s]));
    if constexpr (kBits == 5) pair |= shifted<j + 4 * s - 4>(w.high[0]) & 0x00100010u;
    if constexpr (kBits == 6)
      pair |= shifted<2 * (j + 4 * (s % 2)) - 4>(w.high[s / 2]) & 0x00300030u;
    return pair;
  }
}

// Step s of a tile: codes plus kCodeBias.
template <int s>
__device__ __forceinline__ void decode_biased(const TileWords& w, uint32_t (&a)[4]) {
  a[0] = decode_register<s, 0>(w), a[1] = decode_register<s, 1>(w);
  a[2] = decode_register<s, 2>(w), a[3] = decode_register<s, 3>(w);
}

// Step s of a tile: codes less kZero.
template <int s>
__device__ __forceinline__ void decode(const TileWords& w, uint32_t (&a)[4]) {
  decode_biased<s>(w, a);
  if constexpr (kCodeBias + kZero != 0) {
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = add_to_pair<-(kCodeBias + kZero)>(a[j]);
  }
}

#endif
