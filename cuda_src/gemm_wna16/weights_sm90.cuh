// From packed codes in shared memory to wgmma's fragments of weights in scalar_t.
#pragma once

#include "common/types.cuh"
#include "gemm_wna16/config_sm90.cuh"

#if ENGINE_DTYPE == 1
using scalar2_t = __half2;
constexpr int kCodeBias = 1024;
constexpr uint32_t kBiasPair = 0x64006400;  // 1024: a code below is added by OR
#else
using scalar2_t = __nv_bfloat162;
constexpr int kCodeBias = 128;
constexpr uint32_t kBiasPair = 0x43004300;  // 128
#endif
constexpr bool kIsHalf = sizeof(scalar2_t) == 4 && kCodeBias == 1024;

__device__ __forceinline__ scalar2_t as_pair(uint32_t x) {
  return *reinterpret_cast<const scalar2_t*>(&x);
}
__device__ __forceinline__ uint32_t as_bits(scalar2_t x) {
  return *reinterpret_cast<const uint32_t*>(&x);
}
__device__ __forceinline__ scalar2_t pair_of(float x) {
  return as_pair(pack2<scalar_t>(x, x));
}

// What a lane has of a row tile's slab.
struct PackedSlab {
  uint32_t data[kBits == 8 ? 8 : 4];
  uint32_t high[kBits == 6 ? 2 : 1];
};

__device__ __forceinline__ PackedSlab load_slab(const unsigned char* data,
                                                const unsigned char* high, int lane_idx) {
  PackedSlab slab;
  const uint4 a = *reinterpret_cast<const uint4*>(data + lane_idx * 16);
  slab.data[0] = a.x, slab.data[1] = a.y, slab.data[2] = a.z, slab.data[3] = a.w;
  if constexpr (kBits == 8) {
    const uint4 b = *reinterpret_cast<const uint4*>(data + 512 + lane_idx * 16);
    slab.data[4] = b.x, slab.data[5] = b.y, slab.data[6] = b.z, slab.data[7] = b.w;
  }
  slab.high[0] = 0;
  if constexpr (kBits == 5) slab.high[0] = *reinterpret_cast<const uint32_t*>(high + lane_idx * 4);
  if constexpr (kBits == 6) {
    const uint2 b = *reinterpret_cast<const uint2*>(high + lane_idx * 8);
    slab.high[0] = b.x, slab.high[1] = b.y;
  }
  return slab;
}

template <int kShift>
__device__ __forceinline__ uint32_t shift_right(uint32_t x) {
  if constexpr (kShift >= 0)
    return x >> kShift;
  else
    return x << -kShift;
}

// Whether codes come with kCodeBias added.
constexpr bool kIsBiased = kCode == kInteger && (kBits != 8 || kIsHalf);

// The two codes of register kReg of step kStep, as scalar_t, with their bias. Signed codes of 8
// bits have a bias of 128 more where they are biased.
template <int kStep, int kReg>
__device__ __forceinline__ uint32_t codes(const PackedSlab& slab) {
  if constexpr (kBits == 8) {
    const uint32_t w = slab.data[kStep / 2 * 4 + kStep % 2 * 2 + kReg / 2] >> (kReg % 2 * 8);
    if constexpr (kIsHalf) return ((w & 0x00ff00ff) ^ 0x00800080) | kBiasPair;
    // Below 128 less 128, or less 256 if the sign's bit is set.
    const uint32_t low = (w & 0x007f007f) | 0x43004300, sign = (w & 0x00800080) | 0x43004300;
    return as_bits(__hsub2(as_pair(low), as_pair(sign)));
  } else if constexpr (kCode == kE2m1) {
    // Its bits are those of a number with few bits of exponent, times a power of two.
    const uint32_t w = slab.data[kStep];
    const uint32_t magnitude = shift_right<4 * kReg - (kIsHalf ? 9 : 6)>(w);
    const uint32_t sign = shift_right<4 * kReg - 12>(w);
    const uint32_t bits = (magnitude & (kIsHalf ? 0x0e000e00 : 0x01c001c0)) | (sign & 0x80008000);
    return as_bits(__hmul2(as_pair(bits), as_pair(kIsHalf ? 0x74007400 : 0x7e807e80)));
  } else {
    uint32_t bits = ((slab.data[kStep] >> (4 * kReg)) & 0x000f000f) | kBiasPair;
    if constexpr (kBits == 5)
      bits |= shift_right<kReg + 4 * kStep - 4>(slab.high[0]) & 0x00100010;
    if constexpr (kBits == 6)
      bits |= shift_right<2 * (kReg + 4 * (kStep % 2)) - 4>(slab.high[kStep / 2]) & 0x00300030;
    return bits;
  }
}

constexpr int kBias = !kIsBiased ? 0 : kBits == 8 ? kCodeBias + 128 : kCodeBias;

// Scales and offsets that are scalar_t (exponents are bfloat16) are applied in scalar_t, with one
// rounding; others in float.
constexpr bool kIsExactPair = kIsHalf ? kScaleType == kHalf
                                      : kScaleType == kBfloat16 || kScaleType == kExponent;
// In float the bias is part of the offset where their product with the scale has no rounding.
constexpr bool kFoldsBias = !kIsExactPair && kIsBiased && kOffset != kMinimum && !kHasSuper;

__device__ __forceinline__ float exponent_to_float(uint32_t exponent) {
  return __uint_as_float(exponent == 255 ? 0x7fffffff : exponent == 0 ? 0x00400000 : exponent << 23);
}

__device__ __forceinline__ float scale_to_float(uint32_t bits) {
  if constexpr (kScaleType == kBfloat16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// The scales and offsets of a lane's two rows, for the codes of a group.
struct GroupScales {
  float scale[2], offset[2];       // in float: w = q scale + offset
  uint32_t scale2[2], offset2[2];  // in scalar_t, twice

  __device__ __forceinline__ void load(const unsigned char* scales, const unsigned char* super,
                                       int row) {
    uint32_t s[2], o[2] = {0, 0};  // bits as they are stored
    if constexpr (kScaleType <= kBfloat16) {
      if constexpr (kOffset == kNoOffset) {
        const uint32_t bits = *reinterpret_cast<const uint32_t*>(scales + row * 4);
        s[0] = bits & 0xffff, s[1] = bits >> 16;
      } else {
        const uint2 bits = *reinterpret_cast<const uint2*>(scales + row * 8);
        s[0] = bits.x & 0xffff, o[0] = bits.x >> 16, s[1] = bits.y & 0xffff, o[1] = bits.y >> 16;
      }
    } else if constexpr (kOffset == kNoOffset) {
      const uint32_t bits = *reinterpret_cast<const unsigned short*>(scales + row * 2);
      s[0] = bits & 0xff, s[1] = bits >> 8;
    } else {
      const uint32_t bits = *reinterpret_cast<const uint32_t*>(scales + row * 4);
      s[0] = bits & 0xff, o[0] = bits >> 8 & 0xff, s[1] = bits >> 16 & 0xff, o[1] = bits >> 24;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kHasSuper)
        set_super(i, s[i], o[i], super, row);
      else if constexpr (kIsExactPair)
        set_pair(i, s[i], o[i]);
      else
        set_float(i, s[i], o[i]);
    }
  }

  // The weights of a register of row kRow (0 or 1) from its codes.
  template <int kRow>
  __device__ __forceinline__ uint32_t apply(uint32_t code) const {
    constexpr int kUnbias = kBias + kZero;
    if constexpr (kIsExactPair) {
      scalar2_t q = as_pair(code);
      if constexpr (kOffset == kZeroPoint)
        q = __hsub2(q, as_pair(offset2[kRow]));
      else if constexpr (kUnbias != 0)
        q = __hsub2(q, as_pair(constant_pair(kUnbias)));
      if constexpr (kOffset == kMinimum)
        return as_bits(__hfma2(q, as_pair(scale2[kRow]), as_pair(offset2[kRow])));
      return as_bits(__hmul2(q, as_pair(scale2[kRow])));
    }
    if constexpr (!kFoldsBias && kUnbias != 0)
      code = as_bits(__hsub2(as_pair(code), as_pair(constant_pair(kUnbias))));
    float low, high;
    if constexpr (kIsHalf) {
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&code));
      low = both.x, high = both.y;
    } else {
      low = __uint_as_float(code << 16), high = __uint_as_float(code & 0xffff0000);
    }
    if constexpr (kFoldsBias || kOffset != kNoOffset)
      return pack2<scalar_t>(fmaf(low, scale[kRow], offset[kRow]),
                             fmaf(high, scale[kRow], offset[kRow]));
    return pack2<scalar_t>(low * scale[kRow], high * scale[kRow]);
  }

 private:
  static __device__ __forceinline__ uint32_t constant_pair(int x) {
    return as_bits(pair_of(static_cast<float>(x)));
  }

  __device__ __forceinline__ void set_super(int i, uint32_t s, uint32_t o,
                                            const unsigned char* super, int row) {
    const int factor = kScaleType == kSigned ? static_cast<signed char>(s) : static_cast<int>(s);
    const __half* d = reinterpret_cast<const __half*>(super) + (row * 2 + i) * kValues;
    scale[i] = __half2float(d[0]) * static_cast<float>(factor);
    if constexpr (kOffset != kNoOffset) offset[i] = -__half2float(d[1]) * static_cast<float>(o);
  }

  __device__ __forceinline__ void set_pair(int i, uint32_t s, uint32_t o) {
    if constexpr (kScaleType == kExponent)
      scale2[i] = __float_as_uint(exponent_to_float(s)) >> 16;
    else
      scale2[i] = s;
    scale2[i] |= scale2[i] << 16;
    offset2[i] = o | o << 16;
    if constexpr (kOffset == kZeroPoint && kBias != 0)
      offset2[i] = as_bits(__hadd2(as_pair(offset2[i]), as_pair(constant_pair(kBias))));
  }

  __device__ __forceinline__ void set_float(int i, uint32_t s, uint32_t o) {
    if constexpr (kScaleType == kExponent) {
      scale[i] = exponent_to_float(s);
      return;
    }
    scale[i] = scale_to_float(s);
    const float unbias = kFoldsBias ? static_cast<float>(kBias + kZero) : 0.0f;
    if constexpr (kOffset == kMinimum)
      offset[i] = scale_to_float(o);
    else if constexpr (kOffset == kZeroPoint)
      offset[i] = -(scale_to_float(o) + unbias) * scale[i];
    else
      offset[i] = -unbias * scale[i];
  }
};

// The fragment of step kStep: registers of rows g and g + 8 in turn.
template <int kStep>
__device__ __forceinline__ void decode(const PackedSlab& slab, const GroupScales& scales,
                                       uint32_t (&a)[4]) {
  a[0] = scales.apply<0>(codes<kStep, 0>(slab));
  a[1] = scales.apply<1>(codes<kStep, 1>(slab));
  a[2] = scales.apply<0>(codes<kStep, 2>(slab));
  a[3] = scales.apply<1>(codes<kStep, 3>(slab));
}
