// Rotary position embedding of q and k in one launch, in place or not.
//
//   (a, b) -> (a cos - b sin, b cos + a sin)   for pair i of each head, angle i of the token's row
//
// Pair i is (x[i], x[i + R/2]), or (x[2i], x[2i + 1]) when interleaved. Features R..D are copied.
// The inverse, which is also the gradient, turns by the negative angles. A position outside the
// table makes the rotated features NaN. Arguments: RopeParams, below.
//
// Numerics: float, rounded once.
// Parallelisation: an item is kWidth pairs of a head, or kWidth of its features past R. A thread
// handles the same item of up to kHeads heads, so it loads their part of the table once. blockIdx.x
// is the token, blockIdx.y walks its heads, blockIdx.z the items beyond a block's threads. A thread
// writes only what no other thread reads, so the op may run in place.
// Mirror: engine/reference/rope.py
#include "common/packed.cuh"
#include "common/rotary.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;
constexpr int kHeads = 3;

struct RopeParams {
  const scalar_t *q, *k;    // (T, H, D), (T, K, D); the last axis is contiguous
  const int* positions;     // (T,) row of cos_sin
  const float* cos_sin;     // (P, R) contiguous; each row R/2 cosines, then R/2 sines
  scalar_t *q_out, *k_out;  // like q and k; may be q and k, but not overlap them otherwise
  int64_t q_stride_t, q_stride_h, k_stride_t, k_stride_h;  // elements
  int64_t q_out_stride_t, q_out_stride_h, k_out_stride_t, k_out_stride_h;
  int num_positions;  // P
  int num_q_heads;    // H
  int num_k_heads;    // K
  int rotary_dim;     // R
  int items_per_head;
  int heads_per_block;
  int is_inverse;  // 1: turn by the negative angles (the backward pass)
  int is_large;    // 1: the results are larger than L2, so stored evict-first
};

__device__ __forceinline__ const scalar_t* head_in(const RopeParams& p, int64_t token, int head) {
  if (head < p.num_q_heads) return p.q + token * p.q_stride_t + head * p.q_stride_h;
  return p.k + token * p.k_stride_t + (head - p.num_q_heads) * p.k_stride_h;
}
__device__ __forceinline__ scalar_t* head_out(const RopeParams& p, int64_t token, int head) {
  if (head < p.num_q_heads) return p.q_out + token * p.q_out_stride_t + head * p.q_out_stride_h;
  return p.k_out + token * p.k_out_stride_t + (head - p.num_q_heads) * p.k_out_stride_h;
}

template <bool kInterleaved, int kWidth>
__device__ __forceinline__ void rotate(const Vec<scalar_t, kWidth>& lo,
                                       const Vec<scalar_t, kWidth>& hi, const float (&cos)[kWidth],
                                       const float (&sin)[kWidth], scalar_t* lo_out,
                                       scalar_t* hi_out, bool is_large) {
  scalar_t x[2 * kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    x[j] = lo.v[j];
    x[kWidth + j] = hi.v[j];
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int ia = kInterleaved ? 2 * j : j;
    const int ib = kInterleaved ? 2 * j + 1 : kWidth + j;
    float a = to_float(x[ia]), b = to_float(x[ib]);
    rotate_pair(a, b, cos[j], sin[j]);
    x[ia] = from_float<scalar_t>(a);
    x[ib] = from_float<scalar_t>(b);
  }
  Vec<scalar_t, kWidth> y_lo, y_hi;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    y_lo.v[j] = x[j];
    y_hi.v[j] = x[kWidth + j];
  }
  store_vec(lo_out, y_lo, is_large);
  store_vec(hi_out, y_hi, is_large);
}

template <bool kInterleaved, int kWidth>
__device__ __forceinline__ void rope(const RopeParams& p) {
  const int64_t token = blockIdx.x;
  const int position = p.positions[token];  // loaded early, used late
  const bool is_large = p.is_large != 0;
  const int items = min(p.items_per_head, kThreads);
  const int heads_at_once = kThreads / items, place = threadIdx.x / items;
  const int half = p.rotary_dim / 2;
  const int item = blockIdx.z * kThreads + threadIdx.x % items;
  const int at = item * kWidth;  // index of the first pair, then of the features past R
  const bool is_pair = at < half;
  // Both pairings read two vectors; they differ in the offsets and in which elements form a pair.
  const int lo_at = !is_pair ? half + at : kInterleaved ? 2 * at : at;
  const int hi_at = kInterleaved ? lo_at + kWidth : lo_at + half;
  const int first = static_cast<int>(blockIdx.y) * p.heads_per_block;
  const int end = min(first + p.heads_per_block, p.num_q_heads + p.num_k_heads);
  if (place >= heads_at_once || item >= p.items_per_head) return;

  float cos[kWidth], sin[kWidth];
  bool has_rotation = false;
  for (int base = first + place; base < end; base += kHeads * heads_at_once) {
    Packed<kWidth> lo[kHeads], hi[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = base + i * heads_at_once;
      lo[i] = hi[i] = Packed<kWidth>{};
      if (head >= end) continue;
      const scalar_t* in = head_in(p, token, head);
      lo[i] = load_packed<kWidth>(in + lo_at, is_large);
      if (is_pair) hi[i] = load_packed<kWidth>(in + hi_at, is_large);
    }
    if (is_pair && !has_rotation) {  // loaded while the heads are in flight
      const float* row = rotation_row(p.cos_sin, p.num_positions, p.rotary_dim, position);
      load_rotation(row, p.rotary_dim, at, cos, sin);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sin[j] = p.is_inverse != 0 ? -sin[j] : sin[j];
    }
    has_rotation = true;
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = base + i * heads_at_once;
      if (head >= end) break;
      scalar_t* out = head_out(p, token, head);
      if (is_pair) {
        rotate<kInterleaved, kWidth>(unpack(lo[i]), unpack(hi[i]), cos, sin, out + lo_at,
                                     out + hi_at, is_large);
      } else {
        store_vec(out + lo_at, unpack(lo[i]), is_large);
      }
    }
  }
}

#define ENGINE_ROPE(name, is_interleaved, width)            \
  extern "C" __global__ void __launch_bounds__(kThreads, 6) \
      name(const __grid_constant__ RopeParams p) {          \
    rope<is_interleaved, width>(p);                         \
  }

ENGINE_ROPE(rope_half_vector, false, kVec)
ENGINE_ROPE(rope_half_scalar, false, 1)
ENGINE_ROPE(rope_interleaved_vector, true, kVec)
ENGINE_ROPE(rope_interleaved_scalar, true, 1)
