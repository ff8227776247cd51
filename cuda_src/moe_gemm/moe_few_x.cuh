// x in the kernels for few tokens. Several tokens: the columns of a stage follow its weights in a
// warp's ring. One token: all of x lies in shared memory, in segments of a stage's columns.
//
// With kScalesX a segment is converted to float16: multiplied by the power of two that moves its
// largest value to [2^kPeak, 2^(kPeak + 1)). bfloat16 numbers below 2^(-17 - kPeak) of the largest
// are rounded then, by at most 2^(-25 - kPeak) of it. A float sum that contains the largest value
// rounds off as much; an error shows only where the largest value's code is 0.
#pragma once

#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "moe_gemm/moe_few_problem.cuh"

#if ENGINE_DTYPE != 0

// The columns of x that a stage of the weight is multiplied by.
struct MoeStageX {
  const unsigned char* rows;
  int pitch, count;  // bytes between rows; number of rows
  float factor;      // factor that the sums of a stage's products lack
};

// Returns 2^e for e in [-126, 126], from the exponent field of a float: e + 127.
__device__ __forceinline__ float power_of_two(int field) { return __int_as_float(field << 23); }

// Converts eight values of scalar_t, multiplied by `factor`, to float16.
__device__ __forceinline__ uint4 halves_of(const Vec<scalar_t, kVec>& v, float factor) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = to_float(v.v[2 * i]) * factor, high = to_float(v.v[2 * i + 1]) * factor;
    const __half2 pair = __floats2half2_rn(low, high);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// All of x for one token: a row, or with pair_weights a row per pair.
template <int kColumns, typename Product>
struct MoeWholeX {
  static constexpr bool kScales = Product::kScalesX, kPairs = Product::kPairsX;
  static constexpr int kPeak = Product::kPeak;
  static constexpr int kLanes = kColumns / kVec;  // lanes per segment
  static constexpr int kHeld = 3;                 // vectors in flight per thread
  static_assert(kWarpSize % kLanes == 0, "a segment lies in a warp");

  const MoeFewParams& p;
  unsigned char* x;
  float* factors;
  int thread, threads, segments, count;  // segments per row; vectors of all rows
  Packed<kVec> held[kHeld];

  __device__ __forceinline__ MoeWholeX(const MoeFewParams& p, const MoeFewBlock& b, float* at)
      : p(p), x(reinterpret_cast<unsigned char*>(at)), thread(b.thread), threads(b.threads) {
    segments = b.stages;
    const int rows = p.pair_weights == nullptr ? 1 : p.num_pairs;
    count = rows * segments * kLanes;
    factors = reinterpret_cast<float*>(x + count * 16);
  }

  __device__ __forceinline__ Packed<kVec> get(int index) const {
    Packed<kVec> packed = {};
    const int row = p.pair_weights == nullptr ? 0 : index / (segments * kLanes);
    const int column = (index - row * segments * kLanes) * kVec;
    if (index < count && column < p.k)
      packed = load_packed<kVec>(p.x + static_cast<int64_t>(row) * p.k + column);
    return packed;
  }

  // All lanes of a warp must call it.
  __device__ __forceinline__ void put(int index, const Packed<kVec>& packed) const {
    if constexpr (!kScales) {
      if (index < count) *reinterpret_cast<Packed<kVec>*>(x + index * 16) = packed;
    } else {
      const Vec<scalar_t, kVec> v = unpack<kVec>(packed);
      float peak = 0.0f;
#pragma unroll
      for (int j = 0; j < kVec; ++j) peak = fmaxf(peak, fabsf(to_float(v.v[j])));
#pragma unroll
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
        peak = fmaxf(peak, __shfl_xor_sync(kFullMask, peak, lanes));
      // Both powers of two are normal numbers, also if the peak is 0, infinite or at least 2^127.
      const int field = min(max(__float_as_int(peak) >> 23, 1 + kPeak), 253 + kPeak);
      const uint4 halves = halves_of(v, power_of_two(127 + kPeak + 127 - field));
      if constexpr (kPairs) put_pairs(index, halves);
      if (index >= count) return;
      if constexpr (!kPairs) *reinterpret_cast<uint4*>(x + index * 16) = halves;
      if (index % kLanes == 0) factors[index / kLanes] = power_of_two(field - kPeak);
    }
  }

  // Stores columns 2t, 2t + 8, 2t + 1 and 2t + 9 of each of four steps of 16 columns side by side,
  // for t = 0, 1, 2 and 3 in turn. Two lanes hold a step; each stores two values of t.
  __device__ __forceinline__ void put_pairs(int index, const uint4& halves) const {
    const bool upper = index % 2 == 1;
    const uint32_t from_x = __shfl_xor_sync(kFullMask, upper ? halves.x : halves.z, 1);
    const uint32_t from_y = __shfl_xor_sync(kFullMask, upper ? halves.y : halves.w, 1);
    if (index >= count) return;
    const uint32_t low[2] = {upper ? from_x : halves.x, upper ? from_y : halves.y};
    const uint32_t high[2] = {upper ? halves.z : from_x, upper ? halves.w : from_y};
    unsigned char* to = x + index / 8 * 128 + (upper ? 64 : 0) + index / 2 % 4 * 8;
#pragma unroll
    for (int t = 0; t < 2; ++t)
      *reinterpret_cast<uint2*>(to + t * 32) = {__byte_perm(low[t], high[t], 0x5410),
                                                __byte_perm(low[t], high[t], 0x7632)};
  }

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) held[j] = get(thread + j * threads);
  }
  // A barrier must follow.
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) put(thread + j * threads, held[j]);
#pragma unroll 1
    for (int first = kHeld * threads; first < count; first += threads)
      put(first + thread, get(first + thread));
  }

  // The first segment of the row at `place` in the sorted order.
  __device__ __forceinline__ int first_segment(int place) const {
    return p.pair_weights == nullptr ? 0 : place * segments;
  }
  __device__ __forceinline__ MoeStageX segment(int index) const {
    return {x + index * kColumns * 2, 0, 1, kScales ? factors[index] : 1.0f};
  }
};

#endif
