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

// Returns a group's scales, given its stored words and its super-block's factors.
__device__ __forceinline__ GroupScales group_scales(uint2 own, const GroupScales& factors) {
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
  uint32_t scale_pair[2], offset_pair[2];  // scalar_t path: two copies of each value
  uint32_t rest_pair[2];                   // remainder of a split scale

  // Sets the scales from a group's stored words and its super-block's factors.
  __device__ __forceinline__ void set(uint2 own, const GroupScales& factors) {
    if constexpr (kIsExactPair)
      set_pairs(own);
    else if constexpr (kIsSplit)
      set_split(group_scales(own, factors));
    else
      set_floats(group_scales(own, factors));
  }

  // Sets only the fields that `exact` reads.
  __device__ __forceinline__ void set_offsets(uint2 own) {
    if constexpr (kHasZeroPoint) {
      const GroupScales from(own);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        offset_pair[i] = pack2<scalar_t>(from.offset[i] + kCodeBias, from.offset[i] + kCodeBias);
    }
  }

  // Subtracts the zero point from the codes, exactly in scalar_t.
  template <int kRow>
  __device__ __forceinline__ uint32_t exact(uint32_t codes) const {
    if constexpr (kHasZeroPoint) return fma_pair(offset_pair[kRow], pair_of(-1), codes);
    if constexpr (kUnbias != 0) return add_to_pair<-kUnbias>(codes);
    return codes;
  }

  // Converts a register of codes of row kRow (0: g, 1: g + 8) to weights.
  template <int kRow>
  __device__ __forceinline__ uint32_t apply(uint32_t codes) const {
    if constexpr (kIsPairs && kHasZeroPoint)
      codes = fma_pair(offset_pair[kRow], pair_of(-1), codes);
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
      offset_pair[0] = __byte_perm(own.x, 0, 0x3232);
      offset_pair[1] = __byte_perm(own.y, 0, 0x3232);
      if constexpr (kHasZeroPoint && kCodeBias != 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) offset_pair[i] = add_to_pair<kCodeBias>(offset_pair[i]);
      }
    }
  }

  __device__ __forceinline__ void set_split(const GroupScales& from) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale_pair[i] = pack2<scalar_t>(from.scale[i], from.scale[i]);
      const float rest = from.scale[i] - __uint_as_float(scale_pair[i] & 0xffff0000u);
      rest_pair[i] = pack2<scalar_t>(rest, rest);
      const float offset = from.offset[i] + kCodeBias;
      if constexpr (kHasZeroPoint) offset_pair[i] = pack2<scalar_t>(offset, offset);
    }
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
};

// ---- gate and up --------------------------------------------------------------------------------
//
// In a gated product a warp multiplies 8 rows of gate (as its rows g) and the same 8 rows of up (as
// its rows g + 8): rows 8 `half` to 8 `half` + 7 of one row tile of each. Warps that take whole
// tiles of both do not mix.

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
// kIsExact the scales are not applied.
template <int kStep, bool kIsExact>
__device__ __forceinline__ void decode_weights(const TileWords& words, const RowScales& scales,
                                               uint32_t (&a)[4]) {
  uint32_t codes[4];
  decode_biased<kStep>(words, codes);
  if constexpr (kIsExact) {
    a[0] = scales.exact<0>(codes[0]), a[1] = scales.exact<1>(codes[1]);
    a[2] = scales.exact<0>(codes[2]), a[3] = scales.exact<1>(codes[3]);
    return;
  }
  a[0] = scales.apply<0>(codes[0]), a[1] = scales.apply<1>(codes[1]);
  a[2] = scales.apply<0>(codes[2]), a[3] = scales.apply<1>(codes[3]);
}
