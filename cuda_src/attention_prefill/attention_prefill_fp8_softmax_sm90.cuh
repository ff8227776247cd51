// Turns scores into P = 2^(factor * s - base + 4), packed to e4m3 for P V, for two rows per thread.
// The row sums of P come from columns of ones beside V.
//
// base is an integer, at least factor * s for all keys seen when it was chosen. Their P is thus at
// most 16, and later P below 256 are still representable. An integer base shifts only the exponent
// of P, so rounding does not depend on when the base was chosen. P is first computed with the old
// base, without waiting for a maximum; a row gets a new base only if some P is 256 or more.
//
// An SM computes 16 exponentials per clock, which would limit this kernel. But P is rounded to 3
// mantissa bits, an rms error of 2.7 %, and linear interpolation between powers of 2 is off by only
// 1.9 %. So for some keys the bits of the e4m3 code are computed directly, as
//   code = round(8 * (7 + log2 p) + kLine)
// whose upper bits are the exponent and whose lower bits are the fraction of log2 p. The combined
// error is 3.2 %; kLine makes the mean ratio to the exact P equal 1. Codes below 8 (subnormals)
// come out too small.
#pragma once

#include "common/attention_sm90.cuh"
#include "attention_prefill/attention_prefill_fp8_wgmma.cuh"

// kLineKeys: bit w is set if P of the w-th group of 16 keys is interpolated (for all rows alike,
// since a row's bits must not depend on its position in the tile). kTurns: warpgroups take turns to
// compute P.
template <int kKeys, unsigned kLineKeys, bool kTurns>
struct SoftmaxFp8 {
  static constexpr float kOffset = 4.0f, kLine = -0.46f;
  static constexpr float kHalfStep = 0x1p-24f;  // spacing of subnormal halves
  using Words = unsigned[kKeys / 32][4];

  float factor[2], base[2], rescale[2];

  __device__ __forceinline__ explicit SoftmaxFp8(const float2& factors) {
    factor[0] = factors.x;
    factor[1] = factors.y;
    base[0] = base[1] = kInf;  // no base yet
  }

  // Sets scores of masked keys to -inf. A thread's score 4 j + 2 i + e belongs to its row i and to
  // key 8 j + e, relative to the thread's first key. `last` is the last key that each row sees,
  // also relative to the thread's first key.
  static __device__ __forceinline__ void mask(float (&s)[kKeys / 2], const int (&last)[2]) {
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[4 * j + i] = 8 * j + i % 2 <= last[i / 2] ? s[4 * j + i] : -kInf;
  }

  // Computes four P with the exponential unit (MUFU).
  static __device__ __forceinline__ unsigned by_unit(float a, float b, float c, float d,
                                                     float factor, float shift) {
    return pack_e4m3(exp2_approx(fmaf(a, factor, shift)), exp2_approx(fmaf(b, factor, shift)),
                     exp2_approx(fmaf(c, factor, shift)), exp2_approx(fmaf(d, factor, shift)));
  }

  // Computes two interpolated P as subnormal halves, whose bits are the e4m3 codes; negative ones
  // become 0. `top` accumulates the maximum.
  static __device__ __forceinline__ unsigned by_line(float a, float b, float factor, float shift,
                                                     unsigned& top) {
    const unsigned v = half2_from_positive(fmaf(a, factor, shift), fmaf(b, factor, shift));
    top = half2_max(top, v);
    return v;
  }

  // Computes row i's P; returns nonzero if one is at least 256 or NaN (which interpolation would
  // hide).
  template <unsigned kLines>
  __device__ __forceinline__ bool exponentials(Words& p, const float (&s)[kKeys / 2], int i) const {
    const float shift = kOffset - base[i];
    const float line_factor = 8.0f * kHalfStep * factor[i];
    const float line_shift = fmaf(8.0f, shift, 8 * 7 + kLine) * kHalfStep;
    unsigned large = 0, top = 0;
#pragma unroll
    for (int w = 0; w < kKeys / 16; ++w) {
      const float* const x = s + 8 * w + 2 * i;
      unsigned& word = p[w / 2][w % 2 * 2 + i];
      if (kLines >> w & 1) {
        word = __byte_perm(by_line(x[0], x[1], line_factor, line_shift, top),
                           by_line(x[4], x[5], line_factor, line_shift, top), 0x6420);
      } else {
        word = by_unit(x[0], x[1], x[4], x[5], factor[i], shift);
        large |= word + 0x08080808;  // sets a byte's top bit if P >= 256, code 0x78
      }
    }
    // Likewise sets a half's top bit if the code is at least 0x78.
    return (large & 0x80808080) | ((top + 0x7F887F88) & 0x80008000);
  }

  // Chooses row i's base from its scores, which are finite or, for masked keys, -inf.
  __device__ __forceinline__ bool choose_base(const float (&s)[kKeys / 2], int i, bool fails) {
    float high[2] = {s[2 * i], s[2 * i + 1]};
#pragma unroll
    for (int j = 1; j < kKeys / 8; ++j) {
      high[0] = fmaxf(high[0], s[4 * j + 2 * i]);
      high[1] = fmaxf(high[1], s[4 * j + 2 * i + 1]);
    }
    float top = fmaxf(high[0], high[1]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    unsigned any = fails;
    any |= __shfl_xor_sync(~0u, any, 1);
    any |= __shfl_xor_sync(~0u, any, 2);
    rescale[i] = 1.0f;
    if (!any || top == -kInf) return false;
    float next = ceilf(top * factor[i]);
    if (base[i] != kInf) {
      next = fmaxf(next, base[i]);
      rescale[i] = exp2_approx(base[i] - next);
    }
    base[i] = next;
    return true;
  }

  // Computes P of a key tile. Returns true if the sums so far must be multiplied by `rescale`,
  // which depends only on a row and its keys, not on other rows of the warp.
  template <bool kFirst>
  __device__ __forceinline__ bool step(Words& p, const float (&s)[kKeys / 2], int next_turn) {
    bool fails[2] = {true, true};
    if constexpr (!kFirst) {
#pragma unroll
      for (int i = 0; i < 2; ++i) fails[i] = exponentials<kLineKeys>(p, s, i) || base[i] == kInf;
    }
    if constexpr (kTurns) {
      // P is never negative, so this equals next_turn; but the dependence on the first row's
      // exponentials makes the next warpgroup start only once these are done.
      unsigned signs = 0;
#pragma unroll
      for (int w = 0; w < kKeys / 16; ++w) signs |= kFirst ? 0 : p[w / 2][w % 2 * 2];
      named_barrier_arrive<256>(next_turn + (signs & 0x80));
    }
    const bool any_fails = kFirst || __any_sync(~0u, fails[0] || fails[1]);
    if (any_fails) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (choose_base(s, i, fails[i]) || kFirst) exponentials<0>(p, s, i);
    }
    return any_fails;
  }
};
