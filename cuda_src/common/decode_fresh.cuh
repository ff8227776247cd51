// The newest token of attention_decode_sm90 with FRESH: its queries, key and value come as the
// projection left them, and get their norm and rotation here.
#pragma once

#include "common/decode_ring.cuh"
#include "common/qk_head.cuh"

// The rows of the projection, and what becomes of them.
struct FreshRows {
  const scalar_t *q, *k, *v;  // (B, H or K, D), with strides
  int64_t q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h;
  const int* positions;             // (B,) row of cos_sin; outside of it: NaN
  const float* cos_sin;             // (P, D) cosines, then sines
  const int64_t* slot_mapping;      // (B,) where key and value go; outside the pages: nowhere
  const scalar_t *q_weight, *k_weight;  // (D,) of the norms; null: no norm
  scalar_t *k_pages, *v_pages;
  int num_positions;
  float eps, weight_offset;
};

#if FRESH
#define ENGINE_FRESH_PARAMETERS                                                                    \
  , const scalar_t *fresh_k, const scalar_t *fresh_v, const int *positions, const float *cos_sin,  \
      const int64_t *slot_mapping, const scalar_t *q_weight, const scalar_t *k_weight,             \
      int64_t k_stride_b, int64_t k_stride_h, int64_t v_stride_b, int64_t v_stride_h,              \
      int num_positions, float eps, float weight_offset
#define ENGINE_FRESH_ROWS                                                                          \
  FreshRows {                                                                                      \
    q, fresh_k, fresh_v, q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h,   \
        positions, cos_sin, slot_mapping, q_weight, k_weight, k, v, num_positions, eps,            \
        weight_offset                                                                              \
  }
#else
#define ENGINE_FRESH_PARAMETERS
#define ENGINE_FRESH_ROWS \
  FreshRows {}
#endif

// Where tokens lie in the pages: slot = id of a page * its size + offset.
struct PageLayout {
  int block_shift, num_blocks, num_kv_heads;

  // The slot of a key of a sequence. SAFETY: an id outside the cache is clamped, as the copies do.
  __device__ __forceinline__ int64_t slot(const int* table, int key) const {
    const unsigned page = min(static_cast<unsigned>(table[key >> block_shift]),
                              static_cast<unsigned>(num_blocks - 1));
    return (static_cast<int64_t>(page) << block_shift) + (key & ((1 << block_shift) - 1));
  }
  // Row of the pages (rows of D) where a head of this slot is; -1: nowhere.
  __device__ __forceinline__ int64_t row(int64_t slot, int kv_head) const {
    if (slot < 0 || slot >= static_cast<int64_t>(num_blocks) << block_shift) return -1;
    const int64_t page = slot >> block_shift;
    return (((page * num_kv_heads) + kv_head) << block_shift) + (slot & ((1 << block_shift) - 1));
  }
};

// A computing thread's share of the newest token of one sequence, for one key/value head: two
// vectors of one of the group's queries, of the key or of the value. The formulas, and so the bits,
// are those of qk_norm_rope_store.cu.
class FreshToken {
 public:
  static constexpr int kLanes = kHeadDim / (2 * kVec);  // of a head
  static constexpr int kHeads = kKeyWarps * kWarpSize / kLanes;

  // Asks for what the kernel in front does not write. With `is_stored` this block makes key and
  // value too.
  __device__ __forceinline__ FreshToken(const FreshRows& rows, const PageLayout& layout, int b,
                                        int kv_head, int group, bool is_stored)
      : head_(threadIdx.x / kLanes), column_(threadIdx.x % kLanes * kVec) {
    const int position = rows.positions[b];
    const int64_t page_row = layout.row(rows.slot_mapping[b], kv_head);
    from_ = nullptr;
    page_ = nullptr;
    const scalar_t* weight = nullptr;
    is_rotated_ = head_ <= group;
    if (head_ < group) {
      const int64_t head = static_cast<int64_t>(kv_head) * group + head_;
      from_ = rows.q + b * rows.q_stride_b + head * rows.q_stride_h;
      weight = rows.q_weight;
      to_ = kQueriesAt + head_ * kQueryPitch;
    } else if (head_ < group + 2 && is_stored) {
      from_ = is_rotated_ ? rows.k + b * rows.k_stride_b + kv_head * rows.k_stride_h
                          : rows.v + b * rows.v_stride_b + kv_head * rows.v_stride_h;
      if (is_rotated_) weight = rows.k_weight;
      to_ = kFreshAt + (head_ - group) * kRowBytes;
      if (page_row >= 0)
        page_ = (is_rotated_ ? rows.k_pages : rows.v_pages) + page_row * kHeadDim + column_;
    }
    if (from_ == nullptr) return;
    from_ += column_;
    to_ += column_ * sizeof(scalar_t);
    is_normed_ = weight != nullptr;
    if (is_normed_) {
      weight_[0] = load_packed<kVec>(weight + column_);
      weight_[1] = load_packed<kVec>(weight + column_ + kHalf);
    }
    if (position >= 0 && position < rows.num_positions) {
      const float* angles = rows.cos_sin + static_cast<int64_t>(position) * kHeadDim + column_;
      load_angles(angles, cos_);
      load_angles(angles + kHalf, sin_);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) cos_[j] = sin_[j] = not_a_number();
    }
  }

  // Makes the rows, for all computing warps to read after a barrier of theirs.
  __device__ __forceinline__ void make(const FreshRows& rows, unsigned char* smem) const {
    Packed<kVec> raw[2] = {};
    if (from_ != nullptr) {
      raw[0] = load_packed<kVec>(from_);
      raw[1] = load_packed<kVec>(from_ + kHalf);
    }
    float x[2 * kVec];
    to_floats(raw[0], x);
    to_floats(raw[1], x + kVec);
    float scale = 0.0f;
    if (rows.q_weight != nullptr || rows.k_weight != nullptr)
      scale = norm_scale(head_sum_of_squares(x, kLanes), kHeadDim, rows.eps);
    if (from_ == nullptr) return;
    if (is_normed_) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Vec<scalar_t, kVec> weight = unpack<kVec>(weight_[i]);
#pragma unroll
        for (int j = 0; j < kVec; ++j)
          x[i * kVec + j] = normed(x[i * kVec + j], scale, weight.v[j], rows.weight_offset);
      }
    }
    if (is_rotated_) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) rotate_pair(x[j], x[kVec + j], cos_[j], sin_[j]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Vec<scalar_t, kVec> y = rounded(x + i * kVec);
      store_vec(reinterpret_cast<scalar_t*>(smem + to_) + i * kHalf, y);
      if (page_ != nullptr) store_vec(page_ + i * kHalf, y);
    }
  }

 private:
  static constexpr int kHalf = kHeadDim / 2;

  int head_, column_;
  const scalar_t* from_;  // null: nothing is to be made
  scalar_t* page_;        // where it goes in the pages; null: nowhere
  int to_ = 0;            // where it goes in shared memory
  bool is_rotated_, is_normed_ = false;
  Packed<kVec> weight_[2];
  float cos_[kVec], sin_[kVec];
};
