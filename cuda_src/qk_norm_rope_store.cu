// Everything between the qkv projection and attention in one launch: per-head norms of q, k and v,
// the rotation of q and k, and the stores of k and v to the KV cache.
//
// The formulas are in rmsnorm.cu, rope.cu and kv_store.cu. A position outside the table makes the
// rotated features NaN; k and v are not stored if their slot is outside the pages. Arguments:
// QkNormRopeStoreParams, below.
//
// Numerics: float; rounded after the norm and after the rotation, like the three separate ops; with
// PAGE_CODES then quantized to one-byte codes (common/page_codes.cuh). With NORM_AFTER_ROPE heads
// are rotated first, and rounded once, after the norm. A rotation keeps the mean square, so it is
// computed from the features as they are read. With Q_FACTORS the queries are at last multiplied by
// their position's factor, and rounded again.
// Parallelisation: in the vector kernels a thread holds two 16-byte vectors of a head, the two that
// the rotation pairs up: D / 2 / kVec neighbouring lanes hold a head and sum its squares by
// shuffles. A thread handles the same vectors of up to kHeads heads, so it loads their part of the
// table once. blockIdx.x is the token, blockIdx.y walks its heads (q's, k's, v's). In the scalar
// kernels a warp handles one head. A thread writes only what it has read, and only after the whole
// head has been read.
// Mirror: engine/reference/qk_norm_rope_store.py
#include "common/page_codes.cuh"
#include "common/pdl.cuh"
#include "common/qk_head.cuh"

#ifndef NORM_AFTER_ROPE
#define NORM_AFTER_ROPE 0
#endif
constexpr bool kNormAfterRope = NORM_AFTER_ROPE;
#ifndef Q_FACTORS
#define Q_FACTORS 0
#endif
constexpr bool kHasQFactors = Q_FACTORS;
constexpr int kThreads = 128;
constexpr int kHeads = 3;
// Minimum blocks per multiprocessor: large inputs need the occupancy.
constexpr int kMinBlocks = kArch == 900 && !kHasCodes && !kNormAfterRope ? 6 : 4;

struct QkNormRopeStoreParams {
  scalar_t* q;                  // (T, H, D) updated in place: norm, then rotation
  const scalar_t *k, *v;        // (T, K, D); last axis contiguous, like q's
  const int* positions;         // (T,) row of cos_sin
  const float* cos_sin;         // (P, R) contiguous; each row R/2 cosines, then R/2 sines
  page_t *k_pages, *v_pages;    // (pages, K, block_size, D), equal strides
  const int64_t* slot_mapping;  // (T,)
  const scalar_t *q_weight, *k_weight, *v_weight;  // (D,) norm weights; null: no norm
  int64_t q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h;  // elements
  int64_t page_stride, head_stride, token_stride;                                  // elements
  int64_t num_slots;  // pages * block_size
  int num_positions;  // P
  int num_q_heads;    // H
  int num_kv_heads;   // K
  int head_dim;       // D
  int rotary_dim;     // R
  int block_size;
  int heads_per_block;
  float eps, weight_offset;
  const float *k_scale, *v_scale;  // (K,) scales of quantized pages; else null
  const float* q_factors;          // (P,) factors on queries, by position; read only with Q_FACTORS

  __device__ __forceinline__ int num_heads() const { return num_q_heads + 2 * num_kv_heads; }
};

// Returns the factor on a head at a position: 1 for keys and values, NaN outside the table.
__device__ __forceinline__ float head_factor(const QkNormRopeStoreParams& p, int head,
                                             int position) {
  if (!kHasQFactors || head >= p.num_q_heads) return 1.0f;
  return position >= 0 && position < p.num_positions ? p.q_factors[position] : quiet_nan();
}

// Returns the offset in the pages of head 0 of `slot`, or -1 if the slot is outside the pages.
__device__ __forceinline__ int64_t page_offset(const QkNormRopeStoreParams& p, int64_t slot) {
  if (slot < 0 || slot >= p.num_slots) return -1;
  // A 64-bit division would take longer than the rest of a small launch.
  const int64_t block = p.num_slots <= 0x7fffffff
                            ? static_cast<uint32_t>(slot) / static_cast<uint32_t>(p.block_size)
                            : slot / p.block_size;
  return block * p.page_stride + (slot - block * p.block_size) * p.token_stride;
}

__device__ __forceinline__ const float* rotation_row(const QkNormRopeStoreParams& p, int position) {
  return rotation_row(p.cos_sin, p.num_positions, p.rotary_dim, position);
}

// One head of a token.
struct Head {
  const scalar_t *in, *weight;  // null weight: no norm
  scalar_t* out;                // null: the head is not stored, or goes to a quantized page
  bool is_rotated;
  page_t* page = nullptr;  // destination of the codes
  float page_scale = 1.0f;

  __device__ __forceinline__ Head(const QkNormRopeStoreParams& p, int64_t token, int head,
                                  int64_t page_offset) {
    if (head < p.num_q_heads) {
      out = p.q + token * p.q_stride_t + head * p.q_stride_h;
      in = out;
      weight = p.q_weight;
      is_rotated = true;
      return;
    }
    head -= p.num_q_heads;
    is_rotated = head < p.num_kv_heads;
    weight = is_rotated ? p.k_weight : p.v_weight;
    page_t* pages = is_rotated ? p.k_pages : p.v_pages;
    if (is_rotated) {
      in = p.k + token * p.k_stride_t + head * p.k_stride_h;
    } else {
      head -= p.num_kv_heads;
      in = p.v + token * p.v_stride_t + head * p.v_stride_h;
    }
    page_t* const to = page_offset >= 0 ? pages + page_offset + head * p.head_stride : nullptr;
    if constexpr (kHasCodes) {
      out = nullptr;
      page = to;
      page_scale = (is_rotated ? p.k_scale : p.v_scale)[head];
    } else {
      out = reinterpret_cast<scalar_t*>(to);  // page_t is scalar_t
    }
  }

  __device__ __forceinline__ bool is_stored() const {
    return out != nullptr || (kHasCodes && page != nullptr);
  }
  // Stores N values at feature offset `at`.
  template <int N>
  __device__ __forceinline__ void store(int at, const float* x) const {
    Vec<scalar_t, N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) y.v[i] = from_float<scalar_t>(x[i]);
    if constexpr (kHasCodes) {
      if (page != nullptr) {
        float rounded[N];
#pragma unroll
        for (int i = 0; i < N; ++i) rounded[i] = to_float(y.v[i]);
        store_vec(page + at, to_page<N>(rounded, page_scale));
        return;
      }
    }
    store_vec(out + at, y);
  }
};

// Offsets of a lane's two vectors of a head. Lanes first cover the rotated pairs, then, if R < D,
// the unrotated features, two vectors per lane.
template <bool kInterleaved>
struct Lane {
  int pair;        // index of the first of the lane's kVec pairs
  bool has_pairs;  // false: the lane's features are not rotated
  int lo, hi;      // offsets of the two vectors in a head

  __device__ __forceinline__ Lane(const QkNormRopeStoreParams& p, int lane_idx)
      : pair(lane_idx * kVec), has_pairs(pair < p.rotary_dim / 2) {
    const bool is_split = !kInterleaved && has_pairs;
    lo = is_split ? pair : 2 * pair;
    hi = is_split ? pair + p.rotary_dim / 2 : 2 * pair + kVec;
  }
};

// A lane's two vectors of a norm's weight, reloaded only if the weight changes.
struct LaneWeight {
  const scalar_t* weight = nullptr;
  Packed<kVec> lo, hi;

  __device__ __forceinline__ void load(const scalar_t* from, int lo_at, int hi_at) {
    if (from == nullptr || from == weight) return;
    weight = from;
    lo = load_packed<kVec>(weight + lo_at);
    hi = load_packed<kVec>(weight + hi_at);
  }
  // Multiplies the lane's 2 kVec values by scale * (weight + offset).
  __device__ __forceinline__ void apply(float (&x)[2 * kVec], float scale, float offset) const {
    const Vec<scalar_t, kVec> lo_weight = unpack<kVec>(lo), hi_weight = unpack<kVec>(hi);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      x[j] = normed(x[j], scale, lo_weight.v[j], offset);
      x[kVec + j] = normed(x[kVec + j], scale, hi_weight.v[j], offset);
    }
  }
};

template <bool kInterleaved>
__device__ __forceinline__ void rotate_lane(float (&x)[2 * kVec], const float (&cos)[kVec],
                                            const float (&sin)[kVec]) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const int a = kInterleaved ? 2 * j : j, b = kInterleaved ? 2 * j + 1 : kVec + j;
    rotate_pair(x[a], x[b], cos[j], sin[j]);
  }
}

// Multiplies N rounded features by a head's factor.
template <int N>
__device__ __forceinline__ void scale_features(float* x, float factor) {
  if constexpr (kHasQFactors) {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = to_float(from_float<scalar_t>(x[j])) * factor;
  }
}

template <bool kInterleaved>
__device__ __forceinline__ void process_vectors(const QkNormRopeStoreParams& p) {
  const int64_t token = blockIdx.x;
  const int num_lanes = p.head_dim / (2 * kVec);  // lanes per head
  const int place = threadIdx.x / num_lanes, heads_at_once = kThreads / num_lanes;
  const Lane<kInterleaved> lane_idx(p, threadIdx.x % num_lanes);
  const bool has_norm = p.q_weight != nullptr || p.k_weight != nullptr || p.v_weight != nullptr;
  const int64_t slot = p.slot_mapping[token];  // loaded early, used late
  const int position = p.positions[token];

  const int first = static_cast<int>(blockIdx.y) * p.heads_per_block;
  const int end = min(first + p.heads_per_block, p.num_heads());
  float cos[kVec], sin[kVec];
  LaneWeight weight;
  bool has_rotation = false;
  for (int base = first; base < end; base += kHeads * heads_at_once) {
    Packed<kVec> lo[kHeads], hi[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int index = base + i * heads_at_once + place;
      lo[i] = hi[i] = Packed<kVec>{};
      if (place >= heads_at_once || index >= end) continue;
      const scalar_t* in = Head(p, token, index, -1).in;
      lo[i] = load_packed<kVec>(in + lane_idx.lo);
      hi[i] = load_packed<kVec>(in + lane_idx.hi);
    }
    if (!has_rotation) {  // loaded while the heads are in flight
      has_rotation = true;
      if (place < heads_at_once && base + place < end)
        weight.load(Head(p, token, base + place, -1).weight, lane_idx.lo, lane_idx.hi);
      load_rotation(rotation_row(p, lane_idx.has_pairs ? position : -1), p.rotary_dim,
                    lane_idx.pair, cos, sin);
    }
    const int64_t offset = page_offset(p, slot);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (base + i * heads_at_once >= end) break;  // uniform across the block
      float x[2 * kVec];
      to_floats(lo[i], x);
      to_floats(hi[i], x + kVec);
      float scale = 0.0f;
      if (has_norm) scale = norm_scale(head_sum_of_squares(x, num_lanes), p.head_dim, p.eps);
      const int index = base + i * heads_at_once + place;
      if (place >= heads_at_once || index >= end) continue;
      const Head head(p, token, index, offset);
      if (!head.is_stored()) continue;
      const bool is_rotated = head.is_rotated && lane_idx.has_pairs;
      if (kNormAfterRope && is_rotated) rotate_lane<kInterleaved>(x, cos, sin);
      if (head.weight != nullptr) {
        weight.load(head.weight, lane_idx.lo, lane_idx.hi);
        weight.apply(x, scale, p.weight_offset);
      }
      if (!kNormAfterRope && is_rotated) rotate_lane<kInterleaved>(x, cos, sin);
      scale_features<2 * kVec>(x, head_factor(p, index, position));
      head.store<kVec>(lane_idx.lo, x);
      head.store<kVec>(lane_idx.hi, x + kVec);
    }
  }
}

template <bool kInterleaved>
__device__ __forceinline__ void process_scalars(const QkNormRopeStoreParams& p) {
  const int64_t token = blockIdx.x;
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  const int index = static_cast<int>(blockIdx.y) * p.heads_per_block + warp_idx;
  if (index >= p.num_heads()) return;
  const Head head(p, token, index, page_offset(p, p.slot_mapping[token]));
  if (!head.is_stored()) return;
  float scale = 0.0f;
  if (head.weight != nullptr) {
    float sum = 0.0f;
    for (int i = lane_idx; i < p.head_dim; i += kWarpSize) {
      sum += to_float(head.in[i]) * to_float(head.in[i]);
    }
    scale = norm_scale(warp_sum(sum), p.head_dim, p.eps);
  }
  const auto normalise = [&](float x, int i) {
    return head.weight != nullptr ? normed(x, scale, head.weight[i], p.weight_offset) : x;
  };
  const int half = p.rotary_dim / 2, position = p.positions[token];
  const float factor = head_factor(p, index, position);
  const float* row = rotation_row(p, position);
  for (int pair = lane_idx; pair < half; pair += kWarpSize) {
    const int at = kInterleaved ? 2 * pair : pair, to = kInterleaved ? at + 1 : pair + half;
    float a = to_float(head.in[at]), b = to_float(head.in[to]);
    if (!kNormAfterRope) a = normalise(a, at), b = normalise(b, to);
    if (head.is_rotated) {
      const float cos = row != nullptr ? row[pair] : quiet_nan();
      const float sin = row != nullptr ? row[half + pair] : quiet_nan();
      rotate_pair(a, b, cos, sin);
    }
    if (kNormAfterRope) a = normalise(a, at), b = normalise(b, to);
    scale_features<1>(&a, factor);
    scale_features<1>(&b, factor);
    head.store<1>(at, &a);
    head.store<1>(to, &b);
  }
  for (int i = p.rotary_dim + lane_idx; i < p.head_dim; i += kWarpSize) {
    float x = normalise(to_float(head.in[i]), i);
    scale_features<1>(&x, factor);
    head.store<1>(i, &x);
  }
}

#define ENGINE_QK_NORM_ROPE_STORE(name, min_blocks, function)        \
  extern "C" __global__ void __launch_bounds__(kThreads, min_blocks) \
      name(const __grid_constant__ QkNormRopeStoreParams p) {        \
    pdl_wait();                                                      \
    pdl_trigger(); /* after the wait: `pdl` of attention needs it */ \
    function(p);                                                     \
  }

ENGINE_QK_NORM_ROPE_STORE(qk_norm_rope_store_half_vector, kMinBlocks, process_vectors<false>)
ENGINE_QK_NORM_ROPE_STORE(qk_norm_rope_store_half_scalar, 8, process_scalars<false>)
ENGINE_QK_NORM_ROPE_STORE(qk_norm_rope_store_interleaved_vector, kMinBlocks, process_vectors<true>)
ENGINE_QK_NORM_ROPE_STORE(qk_norm_rope_store_interleaved_scalar, 8, process_scalars<true>)
