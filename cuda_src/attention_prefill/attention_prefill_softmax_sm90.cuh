// The softmax of attention_prefill_sm90, of 64 rows and kKeys keys in a warpgroup's registers.
//
// A thread has two rows: score 4 j + 2 i + e is of its row i and of key 8 j + e, counted from the
// first key it has. The four threads of a quad share their rows.
#pragma once

#include "common/attention_sm90.cuh"

// Keys that a row does not see become -inf. `last`, its last one, is counted from the thread's
// first key; `reach` is how many it sees up to there.
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

// The same, from a bit for each of the thread's keys: bit 2 j + e.
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
  float base[2];     // subtracted from exponents: factor times the running maximum; inf: no key
  float sum[2];      // of this thread's exponentials
  float rescale[2];  // by which the last call of raise() scales earlier sums

  // Before the first tile of keys.
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      base[i] = kInf;
      sum[i] = 0.0f;
    }
  }

  // Raises the bases to a tile's scores, so that a row's largest p is exactly 1. Returns true if
  // some row of the warp has a new base.
  __device__ __forceinline__ bool raise(const float (&s)[kKeys / 2], float factor) {
    float top[2];
    maxima(s, top);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool is_new = base[i] == kInf;
      const float high = fmaxf(is_new ? -kInf : base[i], top[i] * factor);
      const float next = high == -kInf ? kInf : high;
      rescale[i] = exp2_approx(is_new ? 0.0f : base[i] - next);
      base[i] = next;
      sum[i] *= rescale[i];
    }
    return __any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f);
  }

  // p = exp2(factor * s - base), packed as operands of the second product, and added to the sums.
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
      sum[i] += total[0] + total[1];
    }
  }

  // Adds up the sums of the four threads of a row.
  __device__ __forceinline__ void add_up() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
  }

 private:
  static __device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  }

  // Each row's largest score. A negative result may be too small where the base is positive: it
  // does not raise that base either way.
  __device__ __forceinline__ void maxima(const float (&s)[kKeys / 2], float (&top)[2]) const {
    // As integers, floats from 0 on keep their order and exceed all negative floats; and Hopper
    // takes the maximum of three integers at once.
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
};
