// Rotary position embedding of q and k in one launch, in place or not.
//
//   (a, b) -> (a cos - b sin, b cos + a sin)   for pair i of each head, angle i of the token's row
//
//   q, k         (T, H, D), (T, K, D) scalar_t   token and head strides; last axis contiguous
//   positions    (T,)    int32                   row of cos_sin; outside [0, P): NaN if rotated
//   cos_sin      (P, R)  float                   row = R/2 cosines, then R/2 sines; contiguous
//   q_out, k_out as q, k                         may be q and k; no other overlap; is_large: L2
//                                                should not keep them
//
// Pair i is (x[i], x[i + R/2]), or (x[2i], x[2i + 1]) when interleaved. Features R..D are copied.
// Numerics: float, rounded once.
// Parallelisation: an item is kWidth pairs of a head, or kWidth of its features past R; a thread
// has the same item of up to kHeads heads at once, for which it needs one piece of the table.
// blockIdx.x is the token, blockIdx.y walks its heads, blockIdx.z items beyond a block's threads. A
// thread writes only what it read itself, and reads it first, so working in place is safe.
// Mirror: engine/reference/rope.py
#include "common/packed.cuh"
#include "common/rotary.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;
constexpr int kHeads = 3;

struct Heads {
  const scalar_t* in;
  scalar_t* out;
  int64_t in_stride_t, in_stride_h, out_stride_t, out_stride_h;
};

struct Job {
  Heads q, k;
  const int* positions;
  const float* cos_sin;
  int num_positions, num_q_heads, num_k_heads, rotary_dim, items_per_head, heads_per_block;
  bool is_large;
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

// The angles' cosines and sines from pair `first_pair` at a position; NaN outside the table.
template <int kWidth>
__device__ __forceinline__ void load_turns(const Job& job, int position, int first_pair,
                                           float (&cos)[kWidth], float (&sin)[kWidth]) {
  if (position >= 0 && position < job.num_positions) {
    const float* row = job.cos_sin + static_cast<int64_t>(position) * job.rotary_dim + first_pair;
    load_angles(row, cos);
    load_angles(row + job.rotary_dim / 2, sin);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) cos[j] = sin[j] = __int_as_float(0x7fffffff);  // NaN
  }
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
__device__ __forceinline__ void rope(const Job& job) {
  const int64_t token = blockIdx.x;
  const int position = job.positions[token];  // asked for at once, used late
  const int num_heads = job.num_q_heads + job.num_k_heads;
  const int items = min(job.items_per_head, kThreads);
  const int heads_at_once = kThreads / items, place = threadIdx.x / items;
  const int half = job.rotary_dim / 2;
  const int item = blockIdx.z * kThreads + threadIdx.x % items;
  const int at = item * kWidth;  // pairs, then the features past R
  const bool is_pair = at < half;
  // Both pairings read two vectors; they differ in where these lie and which elements pair up.
  const int lo_at = !is_pair ? half + at : kInterleaved ? 2 * at : at;
  const int hi_at = kInterleaved ? lo_at + kWidth : lo_at + half;
  const int first = static_cast<int>(blockIdx.y) * job.heads_per_block;
  const int end = min(first + job.heads_per_block, num_heads);
  if (place >= heads_at_once || item >= job.items_per_head) return;

  const auto in_of = [&](int index) -> const scalar_t* {
    if (index < job.num_q_heads) {
      return job.q.in + token * job.q.in_stride_t + index * job.q.in_stride_h;
    }
    return job.k.in + token * job.k.in_stride_t + (index - job.num_q_heads) * job.k.in_stride_h;
  };
  const auto out_of = [&](int index) -> scalar_t* {
    if (index < job.num_q_heads) {
      return job.q.out + token * job.q.out_stride_t + index * job.q.out_stride_h;
    }
    return job.k.out + token * job.k.out_stride_t + (index - job.num_q_heads) * job.k.out_stride_h;
  };
  float cos[kWidth], sin[kWidth];
  bool has_turns = false;
  for (int base = first + place; base < end; base += kHeads * heads_at_once) {
    Packed<kWidth> lo[kHeads], hi[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int index = base + i * heads_at_once;
      lo[i] = hi[i] = Packed<kWidth>{};
      if (index >= end) continue;
      const scalar_t* in = in_of(index);
      lo[i] = load_packed<kWidth>(in + lo_at, job.is_large);
      if (is_pair) hi[i] = load_packed<kWidth>(in + hi_at, job.is_large);
    }
    if (is_pair && !has_turns)
      load_turns(job, position, at, cos, sin);  // after asking for the heads
    has_turns = true;
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int index = base + i * heads_at_once;
      if (index >= end) break;
      scalar_t* out = out_of(index);
      if (is_pair) {
        rotate<kInterleaved, kWidth>(unpack(lo[i]), unpack(hi[i]), cos, sin, out + lo_at,
                                     out + hi_at, job.is_large);
      } else {
        store_vec(out + lo_at, unpack(lo[i]), job.is_large);
      }
    }
  }
}

#define ENGINE_ROPE(name, is_interleaved, width)                                                \
  extern "C" __global__ void __launch_bounds__(kThreads, 6) name(                               \
      const scalar_t* q, const scalar_t* k, const int* positions, const float* cos_sin,         \
      scalar_t* q_out, scalar_t* k_out, int64_t q_stride_t, int64_t q_stride_h,                 \
      int64_t k_stride_t, int64_t k_stride_h, int64_t q_out_stride_t, int64_t q_out_stride_h,   \
      int64_t k_out_stride_t, int64_t k_out_stride_h, int num_positions, int num_q_heads,       \
      int num_k_heads, int rotary_dim, int items_per_head, int heads_per_block, int is_large) { \
    rope<is_interleaved, width>(                                                                \
        Job{Heads{q, q_out, q_stride_t, q_stride_h, q_out_stride_t, q_out_stride_h},            \
            Heads{k, k_out, k_stride_t, k_stride_h, k_out_stride_t, k_out_stride_h}, positions, \
            cos_sin, num_positions, num_q_heads, num_k_heads, rotary_dim, items_per_head,       \
            heads_per_block, is_large != 0});                                                   \
  }

ENGINE_ROPE(rope_half_vector, false, kVec)
ENGINE_ROPE(rope_half_scalar, false, 1)
ENGINE_ROPE(rope_interleaved_vector, true, kVec)
ENGINE_ROPE(rope_interleaved_scalar, true, 1)
