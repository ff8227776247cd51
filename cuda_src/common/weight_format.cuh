// Packed weight format (engine/weights/formats.py and packing.py): the module's macros as
// constants, and the decoding of a group's stored scales.
//
// A weight is scale * (q - zero) or scale * q + minimum, where q is its code. Lane 4 g + t of a
// warp holds rows g and g + 8 of a row tile (16 rows); their scales are stored side by side.
#pragma once

#include "common/types.cuh"

constexpr int kBits = BITS;               // bits per code: 4, 5, 6 or 8 (signed)
constexpr bool kIsE2m1 = E2M1;            // codes are four-bit floats; otherwise integers
constexpr int kZero = ZERO;               // code of the value 0 in a symmetric format
constexpr int kGroup = GROUP;             // consecutive weights of a row that share a scale
constexpr int kSuperBlock = SUPER_BLOCK;  // weights per super-block, or 0: no super-blocks
constexpr bool kHasZeroPoint = OFFSET == 1;
constexpr bool kHasMinimum = OFFSET == 2;
constexpr bool kIsPaired = OFFSET != 0;  // each scale is stored with a zero point or minimum

enum ScaleType { kHalfScale = 0, kBfloat16Scale = 1, kE8m0Scale = 2, kByteScale = 3 };
constexpr int kScaleType = SCALE_TYPE;

constexpr int kTileRows = 16, kTileColumns = 64;
constexpr int kDataBytes = kBits == 8 ? 1024 : 512;  // bytes per tile
constexpr int kHighBytes = kBits == 5 ? 128 : kBits == 6 ? 256 : 0;
// Bytes for a lane's two rows: a group's scales (and offsets), and a super-block's float16 factors.
constexpr int kScaleBytes = 2 * (kScaleType <= kBfloat16Scale ? 2 : 1) * (kIsPaired ? 2 : 1);
constexpr int kSuperBytes = kSuperBlock == 0 ? 0 : kIsPaired ? 8 : 4;
constexpr int kScaleTileBytes = kScaleBytes * 8;  // bytes of a row tile's scales, per group
constexpr int kSuperTileBytes = kSuperBytes * 8;

// Planes of a packed weight. In the padding, codes and scales are 0.
struct PackedWeight {
  const unsigned char* data;    // (N/16, K/64, kDataBytes)
  const unsigned char* high;    // (N/16, K/64, kHighBytes), or null
  const unsigned char* scales;  // (N/16, groups, kScaleTileBytes)
  const unsigned char* supers;  // (N/16, K/256, kSuperTileBytes), or null
};

// Loads kBytes (0, 2, 4 or 8) bytes as words from global or shared memory.
template <int kBytes>
__device__ __forceinline__ uint2 load_small(const unsigned char* p) {
  if constexpr (kBytes == 0) return uint2{0, 0};
  if constexpr (kBytes == 2) return uint2{*reinterpret_cast<const unsigned short*>(p), 0};
  if constexpr (kBytes == 4) return uint2{*reinterpret_cast<const uint32_t*>(p), 0};
  if constexpr (kBytes == 8) return *reinterpret_cast<const uint2*>(p);
}

__device__ __forceinline__ float2 half2_to_float2(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
__device__ __forceinline__ float2 bfloat162_to_float2(uint32_t word) {
  return float2{__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
// Returns 2^(e - 127); e = 255 is NaN. Mantissa bit 22 turns 0 into 2^-127 and infinity into NaN.
__device__ __forceinline__ float e8m0_to_float(uint32_t e) {
  const uint32_t bits = e << 23;
  return __uint_as_float(((e + 1) & 0xfe) == 0 ? bits | 0x00400000u : bits);
}

// Returns byte `i` of a word minus kLess, exactly: the byte is placed in the mantissa of 2^23.
template <int kLess>
__device__ __forceinline__ float byte_to_float(uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - (8388608.0f + kLess);
}

// Scale, and zero point or minimum, of rows g and g + 8.
struct GroupScales {
  float scale[2], offset[2];

  __device__ __forceinline__ GroupScales() {}
  // Decodes a group's stored words without applying its super-block's factors. In formats with
  // super-blocks the result is integers.
  __device__ __forceinline__ explicit GroupScales(uint2 own) {
    float2 low = {}, high = {};
    if constexpr (kScaleType == kHalfScale) {
      low = half2_to_float2(own.x);
      if constexpr (kIsPaired) high = half2_to_float2(own.y);
    } else if constexpr (kScaleType == kBfloat16Scale) {
      low = bfloat162_to_float2(own.x);
      if constexpr (kIsPaired) high = bfloat162_to_float2(own.y);
    } else if constexpr (kScaleType == kE8m0Scale) {
      low = float2{e8m0_to_float(own.x & 255), e8m0_to_float(own.x >> 8)};
    } else if constexpr (kIsPaired) {
      low = float2{byte_to_float<0>(own.x, 0), byte_to_float<0>(own.x, 1)};
      high = float2{byte_to_float<0>(own.x, 2), byte_to_float<0>(own.x, 3)};
    } else {  // signed
      const uint32_t word = own.x ^ 0x8080u;
      low = float2{byte_to_float<128>(word, 0), byte_to_float<128>(word, 1)};
    }
    if constexpr (kIsPaired) {
      scale[0] = low.x, offset[0] = low.y, scale[1] = high.x, offset[1] = high.y;
    } else {
      scale[0] = low.x, scale[1] = low.y, offset[0] = offset[1] = 0.0f;
    }
  }
  // Decodes a group's stored words and applies its super-block's factors.
  __device__ __forceinline__ GroupScales(uint2 own, uint2 super) : GroupScales(own) {
    if constexpr (kSuperBlock > 0) {
      const GroupScales factors = of_super(super);
#pragma unroll
      for (int i = 0; i < 2; ++i) scale[i] *= factors.scale[i], offset[i] *= factors.offset[i];
    }
  }

  // Decodes a super-block's words to the factors of its scales and offsets.
  __device__ __forceinline__ static GroupScales of_super(uint2 words) {
    GroupScales factors;
    const float2 first = half2_to_float2(words.x), second = half2_to_float2(words.y);
    if constexpr (kIsPaired) {
      factors.scale[0] = first.x, factors.offset[0] = -first.y;
      factors.scale[1] = second.x, factors.offset[1] = -second.y;
    } else {
      factors.scale[0] = first.x, factors.scale[1] = first.y;
      factors.offset[0] = factors.offset[1] = 0.0f;
    }
    return factors;
  }
};

// Loads the scales of group `group` of row tile `tile`; a row of the weight has `groups` groups and
// `supers` super-blocks.
__device__ __forceinline__ GroupScales load_group(const PackedWeight& w, int64_t tile, int group,
                                                  int groups, int supers, int g) {
  const uint2 own =
      load_small<kScaleBytes>(w.scales + ((tile * groups + group) * 8 + g) * kScaleBytes);
  uint2 super = {};
  if constexpr (kSuperBlock > 0) {
    const int64_t block = tile * supers + group / (kSuperBlock > kGroup ? kSuperBlock / kGroup : 1);
    super = load_small<kSuperBytes>(w.supers + (block * 8 + g) * kSuperBytes);
  }
  return GroupScales(own, super);
}
