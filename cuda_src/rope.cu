// Rotary position embedding of q and k in one launch, in place or not.
//
//   (a, b) -> (a cos - b sin, b cos + a sin)   for pair i of each head, angle i of the token's row
//
//   q, k         (T, H, D), (T, K, D) scalar_t   token and head strides; last axis contiguous
//   positions    (T,)    int32                   row of cos_sin; outside [0, P): NaN if rotated
//   cos_sin      (P, R)  float                   row = R/2 cosines, then R/2 sines; contiguous
//   q_out, k_out as q, k                         may be q and k; no other overlap
//
// Pair i is (x[i], x[i + R/2]), or (x[2i], x[2i + 1]) when interleaved. Features R..D are copied.
// Numerics: float, rounded once.
// Parallelisation: an item is kWidth pairs of one head, or kWidth of its features past R; one
// thread an item. blockIdx.x is the token, blockIdx.y walks its items. A thread writes only what it
// read itself, and reads it first, so working in place is safe.
// Mirror: engine/reference/rope.py
#include "common/types.cuh"

constexpr int kThreads = 128;

struct Heads {
  const scalar_t* in;
  scalar_t* out;
  int64_t in_stride_t, in_stride_h, out_stride_t, out_stride_h;
};

// kWidth floats of the table, by 16-byte reads where there is more than one.
template <int kWidth>
__device__ __forceinline__ void load_angles(const float* p, float (&x)[kWidth]) {
  constexpr int kStep = kWidth < 4 ? kWidth : 4;
#pragma unroll
  for (int i = 0; i < kWidth; i += kStep) {
    const Vec<float, kStep> part = load_vec<float, kStep>(p + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) x[i + j] = part.v[j];
  }
}

template <bool kInterleaved, int kWidth>
__device__ __forceinline__ void rotate(const scalar_t* in, scalar_t* out, int first_pair, int half,
                                       const float* cos_sin_row) {
  using V = Vec<scalar_t, kWidth>;
  // Both pairings read two vectors; they differ in where these lie and which elements pair up.
  const int lo_at = kInterleaved ? 2 * first_pair : first_pair;
  const int hi_at = kInterleaved ? lo_at + kWidth : lo_at + half;
  scalar_t x[2 * kWidth];
  const V lo = load_vec<scalar_t, kWidth>(in + lo_at);
  const V hi = load_vec<scalar_t, kWidth>(in + hi_at);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    x[j] = lo.v[j];
    x[kWidth + j] = hi.v[j];
  }
  float cos[kWidth], sin[kWidth];
  if (cos_sin_row != nullptr) {
    load_angles(cos_sin_row + first_pair, cos);
    load_angles(cos_sin_row + half + first_pair, sin);
  } else {  // a position outside the table
#pragma unroll
    for (int j = 0; j < kWidth; ++j) cos[j] = sin[j] = __int_as_float(0x7fffffff);  // NaN
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int ia = kInterleaved ? 2 * j : j;
    const int ib = kInterleaved ? 2 * j + 1 : kWidth + j;
    const float a = to_float(x[ia]), b = to_float(x[ib]);
    x[ia] = from_float<scalar_t>(a * cos[j] - b * sin[j]);
    x[ib] = from_float<scalar_t>(b * cos[j] + a * sin[j]);
  }
  V y_lo, y_hi;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    y_lo.v[j] = x[j];
    y_hi.v[j] = x[kWidth + j];
  }
  store_vec(out + lo_at, y_lo);
  store_vec(out + hi_at, y_hi);
}

template <bool kInterleaved, int kWidth>
__device__ __forceinline__ void rope(Heads q, Heads k, const int* positions, const float* cos_sin,
                                     int num_positions, int num_q_heads, int num_k_heads,
                                     int rotary_dim, int items_per_head) {
  const int item = blockIdx.y * kThreads + threadIdx.x;
  const int head = item / items_per_head;
  if (head >= num_q_heads + num_k_heads) return;
  const bool is_q = head < num_q_heads;
  const Heads& x = is_q ? q : k;
  const int64_t token = blockIdx.x, h = is_q ? head : head - num_q_heads;
  const scalar_t* in = x.in + token * x.in_stride_t + h * x.in_stride_h;
  scalar_t* out = x.out + token * x.out_stride_t + h * x.out_stride_h;

  const int half = rotary_dim / 2;
  const int at = (item % items_per_head) * kWidth;  // pairs first, then the features past R
  if (at >= half) {
    const int feature = rotary_dim + (at - half);
    store_vec(out + feature, load_vec<scalar_t, kWidth>(in + feature));
    return;
  }
  const int position = positions[token];
  const bool is_known = position >= 0 && position < num_positions;
  const float* row = is_known ? cos_sin + static_cast<int64_t>(position) * rotary_dim : nullptr;
  rotate<kInterleaved, kWidth>(in, out, at, half, row);
}

#define ENGINE_ROPE(name, is_interleaved, width)                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads)                                           \
      name(const scalar_t* q, const scalar_t* k, const int* positions, const float* cos_sin,       \
           scalar_t* q_out, scalar_t* k_out, int64_t q_stride_t, int64_t q_stride_h,               \
           int64_t k_stride_t, int64_t k_stride_h, int64_t q_out_stride_t, int64_t q_out_stride_h, \
           int64_t k_out_stride_t, int64_t k_out_stride_h, int num_positions, int num_q_heads,     \
           int num_k_heads, int rotary_dim, int items_per_head) {                                  \
    rope<is_interleaved, width>(                                                                   \
        Heads{q, q_out, q_stride_t, q_stride_h, q_out_stride_t, q_out_stride_h},                   \
        Heads{k, k_out, k_stride_t, k_stride_h, k_out_stride_t, k_out_stride_h}, positions,        \
        cos_sin, num_positions, num_q_heads, num_k_heads, rotary_dim, items_per_head);             \
  }

ENGINE_ROPE(rope_half_vector, false, kVec)
ENGINE_ROPE(rope_half_scalar, false, 1)
ENGINE_ROPE(rope_interleaved_vector, true, kVec)
ENGINE_ROPE(rope_interleaved_scalar, true, 1)
