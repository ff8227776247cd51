// Decodes stored codes to the A operand of mma.sync and wgmma, two 16-bit numbers per register.
//
// A lane's words of a 16 x 64 tile (engine/weights/packing.py) hold the codes of its fragments, in
// steps of 16 columns. For lane 4 g + t, register j of a step holds row g + 8 (j % 2), columns 2t
// and 2t + 1 (plus 8 if j >= 2), the first column in the lower half.
//
// Integers are or-ed into the mantissa of a power of two (number_pairs.cuh). `decode_biased` leaves
// them as kMagic + q, and the caller subtracts kCodeBias times the sum of the other operand from
// its sums; `decode` subtracts the bias itself, which is exact too. All results are exact in both
// dtypes.
#pragma once

#include "common/number_pairs.cuh"
#include "common/weight_format.cuh"

// A lane's words of a tile.
struct TileWords {
  uint32_t data[kBits == 8 ? 8 : 4];
  uint32_t high[kBits == 5 ? 1 : 2];  // high bits of the codes; unused with 4 and 8 bits

  // Loads from the tile's planes in global or shared memory.
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

// Shifts x right by kShift bits, or left by -kShift if kShift is negative.
template <int kShift>
__device__ __forceinline__ uint32_t shifted(uint32_t x) {
  if constexpr (kShift < 0)
    return x << -kShift;
  else
    return x >> kShift;
}

#if ENGINE_DTYPE != 0

// Bias of the codes that decode_biased returns; nonzero for unsigned integers only.
constexpr int kCodeBias = kIsE2m1 || kBits == 8 ? 0 : kMagic;

// Whether a product corrects its sums using the sum of x. For short groups, subtracting the bias
// from the codes takes fewer instructions.
constexpr bool kSumsX = kIsPaired || (kCodeBias != 0 && kGroup > 16);
constexpr int kBias = kCodeBias + kZero;

// Register j of step s of e2m1: two numbers times 2^-14 (float16) or 2^-126 (bfloat16). The code's
// sign, exponent and mantissa are placed in the fields of scalar_t, whose exponent 0 stands for
// 2^(1 - bias). Multiplication by 2^(bias - 1) then corrects subnormal codes too.
template <int s, int j>
__device__ __forceinline__ uint32_t small_e2m1(const TileWords& w) {
  constexpr int kPlace = kIsHalf ? 3 : 6;  // bits below the code, whose sign is the top bit
  constexpr uint32_t kMask = (0x7000u >> kPlace) * 0x00010001u;
  const uint32_t sign = shifted<4 * j - 12>(w.data[s]) & 0x80008000u;
  return (shifted<4 * j - 12 + kPlace>(w.data[s]) & kMask) | sign;
}

// Decodes register j of step s to two codes plus kCodeBias, which is 0 for signed bytes and floats.
template <int s, int j>
__device__ __forceinline__ uint32_t decode_register(const TileWords& w) {
  if constexpr (kIsE2m1) {
    return multiply_pair(small_e2m1<s, j>(w), kIsHalf ? 0x74007400u : 0x7e807e80u);
  } else if constexpr (kBits == 8) {
    return signed_bytes(shifted<8 * (j % 2)>(w.data[2 * s + j / 2]));
  } else {
    uint32_t pair = and_or<0x000f000fu, kMagicWord>(shifted<4 * j>(w.data[s]));
    if constexpr (kBits == 5) pair |= shifted<j + 4 * s - 4>(w.high[0]) & 0x00100010u;
    if constexpr (kBits == 6)
      pair |= shifted<2 * (j + 4 * (s % 2)) - 4>(w.high[s / 2]) & 0x00300030u;
    return pair;
  }
}

// Decodes step s of a tile to codes plus kCodeBias.
template <int s>
__device__ __forceinline__ void decode_biased(const TileWords& w, uint32_t (&a)[4]) {
  a[0] = decode_register<s, 0>(w), a[1] = decode_register<s, 1>(w);
  a[2] = decode_register<s, 2>(w), a[3] = decode_register<s, 3>(w);
}

// Decodes step s of a tile to codes minus kZero.
template <int s>
__device__ __forceinline__ void decode(const TileWords& w, uint32_t (&a)[4]) {
  decode_biased<s>(w, a);
  if constexpr (kCodeBias + kZero != 0) {
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = add_to_pair<-(kCodeBias + kZero)>(a[j]);
  }
}

#endif
