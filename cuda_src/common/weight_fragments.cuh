// Decodes packed codes to weight fragments, rounded to scalar_t like `dequantize` with two
// exceptions: see kIsSplit and kFoldsBias.
#pragma once

#include "common/weight_decode.cuh"

// Scales and offsets that are exact in scalar_t (an e8m0 exponent is exact in bfloat16) are applied
// in scalar_t: everything before the last operation is exact. A scale with more bits than bfloat16
// is split into the sum of two bfloat16 numbers. Its smaller product is rounded before the
// addition, which changes a weight only if it lies within 2^-9 of the midpoint of two representable
// numbers. All other scales are applied in float, at four more instructions per two weights.
constexpr bool kIsExactPair =
    kIsHalf ? kScaleType == kHalfScale : kScaleType == kBfloat16Scale || kScaleType == kE8m0Scale;
constexpr bool kIsSplit = !kIsHalf && !kIsExactPair && !kHasMinimum;
constexpr bool kIsPairs = kIsExactPair || kIsSplit;
constexpr int kUnbias = kCodeBias + kZero;
// On the float path the codes' bias is folded into the offset: its product with the scale is exact.
// Adding it to a minimum rounds by at most 2^-24 (128 scale + |minimum|), so a weight much smaller
// than its scale may differ from `dequantize` by several bfloat16 ulps. float16 has too many
// mantissa bits to allow that.
constexpr bool kFoldsBias = !kIsPairs && kCodeBias != 0 && !(kHasMinimum && kIsHalf);

// Four-bit codes are used in place: one shift for the eight codes of a word. The low nibbles of a
// word's halves belong to row g: or-ed into mantissas they are kMagic + q. The next ones belong to
// row g + 8. In float16 they are or-ed, too: 1024 + 16 q. bfloat16 has no room for that, but with
// zeros around it a nibble is a number, q 2^-129, subnormal below 8. As no factor of bfloat16 is
// large enough to make it q, fragments hold weights / kWeightDivisor, and sums are multiplied by
// it. On the float path, each nibble is a float in the same way; the bias is not folded there, and
// products below 2^-62 are subnormal in the sums. Minimums in bfloat16 would have to be divided,
// too: such formats are left out.
constexpr bool kIsNibbles = kBits == 4 && !kIsE2m1 && (kIsHalf || !(kIsExactPair && kHasMinimum));
constexpr bool kIsTinyFloats = kIsNibbles && !kIsHalf && !kIsPairs;
constexpr float kWeightDivisor = kIsTinyFloats ? 0x1p64f : kIsNibbles && !kIsHalf ? 4.0f : 1.0f;
static_assert(!kIsTinyFloats || kHasMinimum, "symmetric formats are split or exact");
static_assert(!kIsNibbles || kZero % 4 == 0, "a quarter of the zero point is an integer");

// Returns the nibbles of row g + 8 kRow of a word as stored codes.
template <int kRow>
__device__ __forceinline__ uint32_t nibbles(uint32_t word) {
  if constexpr (kRow == 0) return and_or<0x000f000fu, kMagicWord>(word);
  if constexpr (kIsHalf) return and_or<0x00f000f0u, kMagicWord>(word);
  return word & 0x00f000f0u;
}
// Such a code times kNibbleFactor is q / kWeightDivisor + kNibbleBase.
template <int kRow>
constexpr uint32_t kNibbleFactor =
    kRow == 0 ? (kIsHalf ? 0x3c003c00u : 0x3e803e80u)   // 1 or 1/4
              : (kIsHalf ? 0x2c002c00u : 0x7f007f00u);  // 1/16 or 2^127
template <int kRow>
constexpr int kNibbleBase = kIsHalf ? (kRow == 0 ? 1024 : 64) : (kRow == 0 ? 32 : 0);

// Bit b of a subnormal float is 2^(b - 149). The codes of row g begin at bits 0 and 16, those of
// row g + 8 at bits 4 and 20. These factors make them q / kWeightDivisor.
constexpr float kTinyFactor[2] = {0x1p85f, 0x1p81f}, kTinyHighFactor = 0x1p-16f;

// Factors of a super-block's scales and offsets, for rows g and g + 8.
struct SuperFactors {
  float scale[2], offset[2];
  // kIsTinyFloats only: -2^23 times these. A scale of one byte is placed in the mantissa of 2^23.
  float scale_base[2], offset_base[2];

  __device__ __forceinline__ SuperFactors() {}
  __device__ __forceinline__ explicit SuperFactors(uint2 words) {
    const GroupScales from = GroupScales::of_super(words);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = from.scale[i], offset[i] = from.offset[i];
      if constexpr (kIsTinyFloats) {
        scale[i] *= kTinyFactor[i], offset[i] /= kWeightDivisor;
        scale_base[i] = scale[i] * -0x1p23f, offset_base[i] = offset[i] * -0x1p23f;
      }
    }
  }
};

// Returns a group's scales, given its stored words and its super-block's factors.
__device__ __forceinline__ GroupScales group_scales(uint2 own, const SuperFactors& factors) {
  GroupScales scales(own);
  if constexpr (kSuperBlock > 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      scales.scale[i] *= factors.scale[i], scales.offset[i] *= factors.offset[i];
  }
  return scales;
}

// Scales and offsets of a lane's rows g and g + 8 for one group.
struct RowScales {
  float scale[2], offset[2];               // float path: a weight is code * scale + offset
  float high_scale[2];                     // kIsTinyFloats: scale of the nibbles 16 bits higher
  uint32_t scale_pair[2], offset_pair[2];  // scalar_t path: two copies of each value
  uint32_t rest_pair[2];                   // remainder of a split scale

  // Sets the scales from a group's stored words and its super-block's factors.
  __device__ __forceinline__ void set(uint2 own, const SuperFactors& factors) {
    if constexpr (kIsExactPair)
      set_pairs(own);
    else if constexpr (kIsSplit)
      set_split(group_scales(own, factors));
    else if constexpr (kIsTinyFloats)
      set_tiny(own, factors);
    else
      set_floats(group_scales(own, factors));
  }

  // Sets only the fields that `exact` reads.
  __device__ __forceinline__ void set_offsets(uint2 own) {
    if constexpr (kHasZeroPoint) {
      const GroupScales from(own);
      set_zero_points(from.offset[0], from.offset[1]);
    }
  }

  // Subtracts the zero point from stored codes and divides nibbles by kWeightDivisor, both exactly.
  template <int kRow>
  __device__ __forceinline__ uint32_t exact(uint32_t codes) const {
    constexpr uint32_t kFactor = kIsNibbles ? kNibbleFactor<kRow> : pair_of(1);
    constexpr int kBase = kIsNibbles ? kNibbleBase<kRow> + (kIsHalf ? kZero : kZero / 4) : kUnbias;
    if constexpr (kHasZeroPoint) return fma_pair(codes, kFactor, offset_pair[kRow]);
    if constexpr (kIsNibbles || kBase != 0) return fma_pair(codes, kFactor, pair_of(-kBase));
    return codes;
  }

  // Converts the nibbles of row g + 8 kRow of a word to weights.
  template <int kRow>
  __device__ __forceinline__ uint32_t apply_tiny(uint32_t word) const {
    const float low = __uint_as_float(word & 0xfu << 4 * kRow);
    const float high = __uint_as_float(word & 0xf0000u << 4 * kRow);
    return pack2<scalar_t>(fmaf(low, scale[kRow], offset[kRow]),
                           fmaf(high, high_scale[kRow], offset[kRow]));
  }

  // Converts a register of codes of row kRow (0: g, 1: g + 8) to weights.
  template <int kRow>
  __device__ __forceinline__ uint32_t apply(uint32_t codes) const {
    if constexpr (kIsPairs)
      codes = exact<kRow>(codes);
    else if constexpr (kUnbias != 0 && !kFoldsBias)
      codes = add_to_pair<-kUnbias>(codes);
    if constexpr (kIsSplit)
      return fma_pair(codes, scale_pair[kRow], multiply_pair(codes, rest_pair[kRow]));
    if constexpr (kIsExactPair && kHasMinimum)
      return fma_pair(codes, scale_pair[kRow], offset_pair[kRow]);
    if constexpr (kIsExactPair) return multiply_pair(codes, scale_pair[kRow]);
    const float2 q = kIsHalf ? half2_to_float2(codes) : bfloat162_to_float2(codes);
    if constexpr (kFoldsBias || kIsPaired)
      return pack2<scalar_t>(fmaf(q.x, scale[kRow], offset[kRow]),
                             fmaf(q.y, scale[kRow], offset[kRow]));
    return pack2<scalar_t>(q.x * scale[kRow], q.y * scale[kRow]);
  }

 private:
  __device__ __forceinline__ void set_pairs(uint2 own) {
    if constexpr (kScaleType == kE8m0Scale) {
      scale_pair[0] = __float_as_uint(e8m0_to_float(own.x & 255));
      scale_pair[1] = __float_as_uint(e8m0_to_float(own.x >> 8));
#pragma unroll
      for (int i = 0; i < 2; ++i) scale_pair[i] = __byte_perm(scale_pair[i], 0, 0x3232);
    } else if constexpr (!kIsPaired) {
      scale_pair[0] = __byte_perm(own.x, 0, 0x1010), scale_pair[1] = __byte_perm(own.x, 0, 0x3232);
    } else {
      scale_pair[0] = __byte_perm(own.x, 0, 0x1010), scale_pair[1] = __byte_perm(own.y, 0, 0x1010);
      const GroupScales from(own);
      if constexpr (kHasZeroPoint) {
        set_zero_points(from.offset[0], from.offset[1]);
      } else {
        offset_pair[0] = __byte_perm(own.x, 0, 0x3232);
        offset_pair[1] = __byte_perm(own.y, 0, 0x3232);
      }
    }
  }

  __device__ __forceinline__ void set_split(const GroupScales& from) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale_pair[i] = pack2<scalar_t>(from.scale[i], from.scale[i]);
      const float rest = from.scale[i] - __uint_as_float(scale_pair[i] & 0xffff0000u);
      rest_pair[i] = pack2<scalar_t>(rest, rest);
    }
    if constexpr (kHasZeroPoint) set_zero_points(from.offset[0], from.offset[1]);
  }

  // Sets what `exact` adds to the codes of rows g and g + 8, given their zero points.
  __device__ __forceinline__ void set_zero_points(float low, float high) {
    if constexpr (kIsNibbles) {
      low = -low / kWeightDivisor - kNibbleBase<0>;
      high = -high / kWeightDivisor - kNibbleBase<1>;
    } else {
      low = -low - kCodeBias, high = -high - kCodeBias;
    }
    offset_pair[0] = pack2<scalar_t>(low, low), offset_pair[1] = pack2<scalar_t>(high, high);
  }

  __device__ __forceinline__ void set_floats(const GroupScales& from) {
    constexpr float kFolded = kFoldsBias ? kUnbias : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = from.scale[i];
      offset[i] = kHasMinimum ? fmaf(-kFolded, scale[i], from.offset[i])
                              : -(from.offset[i] + kFolded) * scale[i];
    }
  }

  __device__ __forceinline__ void set_tiny(uint2 own, const SuperFactors& factors) {
    if constexpr (kSuperBlock == 0) {
      const GroupScales from(own);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        scale[i] = from.scale[i] * kTinyFactor[i], offset[i] = from.offset[i] / kWeightDivisor;
    } else {
      const auto placed = [&](int byte) {
        return __uint_as_float(__byte_perm(own.x, 0x4b000000u, 0x7440 + byte));
      };
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale[i] = fmaf(placed(2 * i), factors.scale[i], factors.scale_base[i]);
        offset[i] = fmaf(placed(2 * i + 1), factors.offset[i], factors.offset_base[i]);
      }
    }
    high_scale[0] = scale[0] * kTinyHighFactor, high_scale[1] = scale[1] * kTinyHighFactor;
  }
};

// ---- gate and up --------------------------------------------------------------------------------
//
// In a gated product of a tile for many tokens (kStoresHalves; kMixesRows in moe_gemm), a warp
// multiplies 8 rows of gate (as its rows g) and the same 8 rows of up (as its rows g + 8): rows
// 8 `half` to 8 `half` + 7 of one row tile of each. Other tiles do not mix rows: gate and up meet
// in the epilogue.

template <int kShift, uint32_t kLow>
__device__ __forceinline__ uint32_t mix_words(uint32_t gate, uint32_t up, int half) {
  return (gate >> half * kShift & kLow) | (up << (1 - half) * kShift & ~kLow);
}

__device__ __forceinline__ TileWords mix(const TileWords& gate, const TileWords& up, int half) {
  TileWords words;
#pragma unroll
  for (int i = 0; i < (kBits == 8 ? 8 : 4); ++i)
    words.data[i] = kBits == 8 ? mix_words<8, 0x00ff00ffu>(gate.data[i], up.data[i], half)
                               : mix_words<4, 0x0f0f0f0fu>(gate.data[i], up.data[i], half);
  if constexpr (kBits == 5)
    words.high[0] = mix_words<1, 0x55555555u>(gate.high[0], up.high[0], half);
  if constexpr (kBits == 6) {
    words.high[0] = mix_words<2, 0x33333333u>(gate.high[0], up.high[0], half);
    words.high[1] = mix_words<2, 0x33333333u>(gate.high[1], up.high[1], half);
  }
  return words;
}

// Mixes the stored scales of two rows, kBytes in total.
template <int kBytes>
__device__ __forceinline__ uint2 mix(uint2 gate, uint2 up, int half) {
  if constexpr (kBytes == 8) return half ? uint2{gate.y, up.y} : uint2{gate.x, up.x};
  if constexpr (kBytes == 4) return {__byte_perm(gate.x, up.x, half ? 0x7632 : 0x5410), 0};
  return {__byte_perm(gate.x, up.x, half ? 0x7751 : 0x7740), 0};
}

// Decodes the fragment of step kStep; its registers alternate between rows g and g + 8. With
// kIsExact the scales are not applied: the results are (q - zero) / kWeightDivisor.
template <int kStep, bool kIsExact>
__device__ __forceinline__ void decode_weights(const TileWords& words, const RowScales& scales,
                                               uint32_t (&a)[4]) {
  const uint32_t word = words.data[kStep], second = word >> 8;
  if constexpr (kIsTinyFloats) {
    a[0] = scales.apply_tiny<0>(word), a[1] = scales.apply_tiny<1>(word);
    a[2] = scales.apply_tiny<0>(second), a[3] = scales.apply_tiny<1>(second);
  } else {
    uint32_t codes[4];
    if constexpr (kIsNibbles && (kIsExact || kIsPairs)) {
      codes[0] = nibbles<0>(word), codes[1] = nibbles<1>(word);
      codes[2] = nibbles<0>(second), codes[3] = nibbles<1>(second);
    } else {
      decode_biased<kStep>(words, codes);
    }
    if constexpr (kIsExact) {
      a[0] = scales.exact<0>(codes[0]), a[1] = scales.exact<1>(codes[1]);
      a[2] = scales.exact<0>(codes[2]), a[3] = scales.exact<1>(codes[3]);
    } else {
      a[0] = scales.apply<0>(codes[0]), a[1] = scales.apply<1>(codes[1]);
      a[2] = scales.apply<0>(codes[2]), a[3] = scales.apply<1>(codes[3]);
    }
  }
}
