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

// kExact: the base is the running maximum in all tiles.
template <int kKeys, bool kExact>
struct OnlineSoftmax {
  // A row's base may be smaller than a later maximum, as long as a thread's exponentials of a tile
  // sum to no more than this: each fits float16.
  static constexpr float kLargeSum = 4096.0f;

  float base[2];        // what exponents are less, as powers of 2; inf: no key was seen
  float sum[2];         // of this thread's exponentials
  float correction[2];  // what earlier sums are worth after the last step

  // Before the first tile of keys. From tile first_exact[i] on row i's base is its maximum.
  __device__ __forceinline__ void start(const int (&first_exact)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      base[i] = kInf;
      sum[i] = 0.0f;
      exact[i] = first_exact[i];
    }
    exact_low = __reduce_min_sync(~0u, min(exact[0], exact[1]));
    exact_high = __reduce_max_sync(~0u, ::max(exact[0], exact[1]));
  }

  // Turns the scores of key tile n into p = exp2(factor * s - base), packed for the second product,
  // and adds them to the sum. Returns true if some row of the warp has a new base. Which rows do,
  // and so each row's bits, depends on nothing but their own scores and where these lie.
  //
  // Tiles come from the last to the first. In the first ones that row i sees, n >= exact[i], its
  // base becomes the running maximum, so that its largest p is 1, without a rounding error. But to
  // wait for the maximum of a tile costs a sixth of the time, and the more keys a row has seen, the
  // less its largest p weighs. So in later tiles the base there is is tried at once, and renewed
  // only where sums grow large.
  template <bool kFirst>
  __device__ __forceinline__ bool step(unsigned (&p)[kKeys / 16][4], const float (&s)[kKeys / 2],
                                       float factor, int n) {
    float total[2];
    const bool tries = !kExact && !kFirst && n < exact_high;
    bool renews = kExact || kFirst || n >= exact_low;
    if (tries) {
#pragma unroll
      for (int i = 0; i < 2; ++i) total[i] = exponentials(p, s, i, factor, base[i]);
      if (!renews)
        renews = __any_sync(~0u, !(fmaxf(total[0], total[1]) <= kLargeSum) ||
                                     fmaxf(base[0], base[1]) == kInf);
    }
    if (renews) {
      bool renew[2] = {kExact || n >= exact[0], kExact || n >= exact[1]};
      if (tries) {
#pragma unroll
        for (int i = 0; i < 2; ++i) renew[i] |= !(quad_max(total[i]) <= kLargeSum);
      }
      float top[2];
      maxima(s, top);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_new = base[i] == kInf;
        const float old = is_new ? -kInf : base[i];
        const float high = is_new || renew[i] ? top[i] * factor : -kInf;
        const float next = fmaxf(old, high) == -kInf ? kInf : fmaxf(old, high);
        correction[i] = exp2_approx(is_new ? 0.0f : base[i] - next);
        base[i] = next;
        sum[i] *= correction[i];
        total[i] = exponentials(p, s, i, factor, next);
      }
      renews = __any_sync(~0u, correction[0] != 1.0f || correction[1] != 1.0f);
    }
    sum[0] += total[0];
    sum[1] += total[1];
    return renews;
  }

  // The sums of whole rows.
  __device__ __forceinline__ void add_up() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    }
  }

 private:
  int exact[2];
  int exact_low, exact_high;  // of the warp's rows

  // Row i's part of exp2(factor * s - base); returns its sum.
  static __device__ __forceinline__ float exponentials(unsigned (&p)[kKeys / 16][4],
                                                       const float (&s)[kKeys / 2], int i,
                                                       float factor, float base) {
    float total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      const float x = exp2_approx(fmaf(s[4 * j + 2 * i], factor, -base));
      const float y = exp2_approx(fmaf(s[4 * j + 2 * i + 1], factor, -base));
      total[0] += x;
      total[1] += y;
      p[j / 2][j % 2 * 2 + i] = pack_pair(x, y);
    }
    return total[0] + total[1];
  }

  static __device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  }

  // Each row's largest score; one that is negative may be too small a number where base is not.
  __device__ __forceinline__ void maxima(const float (&s)[kKeys / 2], float (&top)[2]) const {
    // As integers floats from 0 on have their order, and more than negative ones; and Hopper takes
    // the maximum of three integers at once.
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
