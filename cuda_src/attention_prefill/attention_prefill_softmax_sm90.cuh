// Online softmax of attention_prefill_sm90, for 64 rows x kKeys keys in a warpgroup's registers, or
// 16 rows in a warp's.
//
// A thread holds parts of two rows: score 4 j + 2 i + e belongs to its row i and to key 8 j + e,
// relative to its first key. The four threads of a quad share the same rows.
#pragma once

#include "common/attention_sm90.cuh"

// Sets scores of masked keys to -inf. `last` is a row's last visible key, relative to the thread's
// first key; `reach` is the number of visible keys up to and including it.
template <int kKeys>
__device__ __forceinline__ void mask_scores(float (&s)[kKeys / 2], const int (&last)[2],
                                            const unsigned (&reach)[2]) {
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool seen = static_cast<unsigned>(last[i / 2] - (8 * j + i % 2)) < reach[i / 2];
      s[4 * j + i] = seen ? s[4 * j + i] : -kInf;
    }
}

// mask_scores from a bit mask of the thread's visible keys: bit 2 j + e is key 8 j + e.
template <int kKeys>
__device__ __forceinline__ void mask_scores(float (&s)[kKeys / 2], const unsigned (&seen)[2]) {
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[4 * j + i] = seen[i / 2] >> (2 * j + i % 2) & 1 ? s[4 * j + i] : -kInf;
}

template <int kKeys>
struct OnlineSoftmax {
  float base[2];     // subtracted from exponents: factor * running maximum; inf: no key yet
  float sum[2];      // sum of this thread's exponentials
  float rescale[2];  // factor for the sums of earlier tiles, set by raise() or raise_to()

  // Resets the state before the first key tile.
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      base[i] = kInf;
      sum[i] = 0.0f;
    }
  }

  // Raises the bases to a tile's maxima, so that a row's largest p is exactly 1. Returns true if
  // the base of any row of the warp changed.
  __device__ __forceinline__ bool raise(const float (&s)[kKeys / 2], float factor) {
    float top[2];
    maxima(s, top);
    raise_to(top, factor);
    return __any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f);
  }
  // Raises the bases to the maxima `top` of some scores.
  __device__ __forceinline__ void raise_to(const float (&top)[2], float factor) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool is_new = base[i] == kInf;
      const float high = fmaxf(is_new ? -kInf : base[i], top[i] * factor);
      const float next = high == -kInf ? kInf : high;
      rescale[i] = exp2_approx(is_new ? 0.0f : base[i] - next);
      base[i] = next;
    }
  }

  // Computes p = exp2(factor * s - base), packs it as operand A of P V, and adds it to the rescaled
  // sums.
  __device__ __forceinline__ void exponentials(unsigned (&p)[kKeys / 16][4],
                                               const float (&s)[kKeys / 2], float factor) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        const float x = exp2_approx(fmaf(s[4 * j + 2 * i], factor, -base[i]));
        const float y = exp2_approx(fmaf(s[4 * j + 2 * i + 1], factor, -base[i]));
        total[0] += x;
        total[1] += y;
        p[j / 2][j % 2 * 2 + i] = pack2<scalar_t>(x, y);
      }
      sum[i] = fmaf(sum[i], rescale[i], total[0] + total[1]);
    }
  }

  // Reduces the sums over the four threads of a row.
  __device__ __forceinline__ void add_up() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
  }

  // Finds each row's largest score. If the base is positive, a negative result may be too small: it
  // would not raise the base anyway.
  __device__ __forceinline__ void maxima(const float (&s)[kKeys / 2], float (&top)[2]) const {
    // Reinterpreted as integers, non-negative floats keep their order and exceed all negative
    // floats, and Hopper computes the maximum of three integers in one instruction.
    int high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int part[2] = {0x80000000, 0x80000000};
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
        part[j % 2] = __vimax3_s32(part[j % 2], __float_as_int(s[4 * j + 2 * i]),
                                   __float_as_int(s[4 * j + 2 * i + 1]));
      high[i] = ::max(part[0], part[1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high[i] = ::max(high[i], __shfl_xor_sync(~0u, high[i], 1));
      high[i] = ::max(high[i], __shfl_xor_sync(~0u, high[i], 2));
      top[i] = __int_as_float(high[i]);
    }
    const auto unsure = [&](int i) { return high[i] < 0 && !(base[i] >= 0.0f && base[i] < kInf); };
    if (!__any_sync(~0u, unsure(0) || unsure(1))) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = -kInf;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
        top[i] = fmaxf(top[i], fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
      top[i] = quad_max(top[i]);
    }
  }

 private:
  static __device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  }
};
