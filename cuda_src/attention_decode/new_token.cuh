// The newest token of attention_decode_sm90 with FRESH: its queries, key and value come as the
// projection left them, and get their norm and rotation here.
#pragma once

#include "attention_decode/ring.cuh"
#include "common/qk_head.cuh"

// The rows of the projection, and what becomes of them.
struct FreshRows {
  const scalar_t *q, *k, *v;  // (B, H or K, D), with strides
  int64_t q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h;
  const int* positions;                 // (B,) row of cos_sin; outside of it: NaN
  const float* cos_sin;                 // (P, D) cosines, then sines
  const int64_t* slot_mapping;          // (B,) where key and value go; outside the pages: nowhere
  const scalar_t *q_weight, *k_weight;  // (D,) of the norms; null: no norm
  scalar_t *k_pages, *v_pages;
  int num_positions;
  float eps, weight_offset;
};

#if FRESH
#define ENGINE_FRESH_PARAMETERS                                                                   \
  , const scalar_t *fresh_k, const scalar_t *fresh_v, const int *positions, const float *cos_sin, \
      const int64_t *slot_mapping, const scalar_t *q_weight, const scalar_t *k_weight,            \
      int64_t k_stride_b, int64_t k_stride_h, int64_t v_stride_b, int64_t v_stride_h,             \
      int num_positions, float eps, float weight_offset
#define ENGINE_FRESH_ROWS                                                                        \
  FreshRows {                                                                                    \
    q, fresh_k, fresh_v, q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h, \
        positions, cos_sin, slot_mapping, q_weight, k_weight, k, v, num_positions, eps,          \
        weight_offset                                                                            \
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

// What a block makes of the newest token of a sequence, and where in shared memory it goes.
struct FreshPlan {
  int b, kv_head, group;
  bool has_queries, is_stored;  // the group's queries are made; key and value are
  int q_at, fresh_at;
};

// A thread's share of the newest token of one sequence, for one key/value head: two vectors of one
// of the group's queries (0 to group - 1), of the key (group) or of the value. The formulas, and so
// the bits, are those of qk_norm_rope_store.cu.
class FreshToken {
 public:
  static constexpr int kLanes = kHeadDim / (2 * kVec);  // of a head

  // What the kernel in front does not write, for those who ask for it before they wait.
  struct Inputs {
    Packed<kVec> weight[2];
    float cos[kVec], sin[kVec];
  };

  // Lanes of a head follow each other.
  __device__ __forceinline__ FreshToken(const FreshRows& rows, const PageLayout& layout,
                                        const FreshPlan& plan, int head)
      : column_(threadIdx.x % kLanes * kVec), is_rotated_(head <= plan.group) {
    if (head < plan.group) {
      if (!plan.has_queries) return;
      const int64_t number = static_cast<int64_t>(plan.kv_head) * plan.group + head;
      from_ = rows.q + plan.b * rows.q_stride_b + number * rows.q_stride_h;
      weight_ = rows.q_weight;
      to_ = plan.q_at + head * kQueryPitch;
    } else if (head < plan.group + 2 && plan.is_stored) {
      from_ = is_rotated_ ? rows.k + plan.b * rows.k_stride_b + plan.kv_head * rows.k_stride_h
                          : rows.v + plan.b * rows.v_stride_b + plan.kv_head * rows.v_stride_h;
      if (is_rotated_) weight_ = rows.k_weight;
      if (plan.fresh_at >= 0) to_ = plan.fresh_at + (head - plan.group) * kRowBytes;
      const int64_t page_row = layout.row(rows.slot_mapping[plan.b], plan.kv_head);
      if (page_row >= 0)
        page_ = (is_rotated_ ? rows.k_pages : rows.v_pages) + page_row * kHeadDim + column_;
    }
    if (from_ != nullptr && is_rotated_) position_ = rows.positions[plan.b];
  }

  __device__ __forceinline__ Inputs inputs(const FreshRows& rows) const {
    Inputs inputs{};
    load_weights(inputs.weight);
    load_rotation(rows, inputs.cos, inputs.sin);
    return inputs;
  }

  // Makes the rows, for others to read after a barrier. All lanes of a warp must call it together.
  __device__ __forceinline__ void make(const FreshRows& rows, unsigned char* smem,
                                       const Inputs* inputs = nullptr) const {
    Packed<kVec> raw[2] = {};
    if (from_ != nullptr) {
      raw[0] = load_packed<kVec>(from_ + column_);
      raw[1] = load_packed<kVec>(from_ + column_ + kHalf);
    }
    float x[2 * kVec];
    to_floats(raw[0], x);
    to_floats(raw[1], x + kVec);
    float scale = 0.0f;
    if (rows.q_weight != nullptr || rows.k_weight != nullptr)
      scale = norm_scale(head_sum_of_squares(x, kLanes), kHeadDim, rows.eps);
    if (from_ == nullptr) return;
    if (weight_ != nullptr) {
      Packed<kVec> weights[2];
      if (inputs == nullptr) load_weights(weights);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Vec<scalar_t, kVec> weight =
            unpack<kVec>(inputs == nullptr ? weights[i] : inputs->weight[i]);
#pragma unroll
        for (int j = 0; j < kVec; ++j)
          x[i * kVec + j] = normed(x[i * kVec + j], scale, weight.v[j], rows.weight_offset);
      }
    }
    if (is_rotated_) {
      float cos[kVec], sin[kVec];
      if (inputs == nullptr) load_rotation(rows, cos, sin);
#pragma unroll
      for (int j = 0; j < kVec; ++j)
        rotate_pair(x[j], x[kVec + j], inputs == nullptr ? cos[j] : inputs->cos[j],
                    inputs == nullptr ? sin[j] : inputs->sin[j]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Vec<scalar_t, kVec> y = rounded(x + i * kVec);
      if (to_ >= 0) store_vec(reinterpret_cast<scalar_t*>(smem + to_) + column_ + i * kHalf, y);
      if (page_ != nullptr) store_vec(page_ + i * kHalf, y);
    }
  }

 private:
  static constexpr int kHalf = kHeadDim / 2;

  int column_;
  bool is_rotated_;
  const scalar_t* from_ = nullptr;    // null: nothing is to be made
  const scalar_t* weight_ = nullptr;  // of its norm; null: none
  scalar_t* page_ = nullptr;          // where it goes in the pages; null: nowhere
  int to_ = -1;                       // where it goes in shared memory; -1: nowhere
  int position_ = -1;

  __device__ __forceinline__ void load_weights(Packed<kVec> (&weights)[2]) const {
    if (weight_ == nullptr) return;
    weights[0] = load_packed<kVec>(weight_ + column_);
    weights[1] = load_packed<kVec>(weight_ + column_ + kHalf);
  }
  __device__ __forceinline__ void load_rotation(const FreshRows& rows, float (&cos)[kVec],
                                                float (&sin)[kVec]) const {
    if (position_ >= 0 && position_ < rows.num_positions) {
      const float* angles = rows.cos_sin + static_cast<int64_t>(position_) * kHeadDim + column_;
      load_angles(angles, cos);
      load_angles(angles + kHalf, sin);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) cos[j] = sin[j] = not_a_number();
    }
  }
};

// Whether a segment has its sequence's last keys.
__device__ __forceinline__ bool has_newest(const Segment& segment) {
  return segment.num_tiles > 0 &&
         segment.num_keys <= segment.first_key + segment.num_tiles * kTileKeys;
}

// The newest key of a segment's sequence if the segment has it and its place in the pages is where
// the newest token goes, else -1: elsewhere, or nowhere, it is not what the sequence has there.
__device__ __forceinline__ int fresh_key_of(const FreshRows& rows, const PageLayout& layout,
                                            const Segment& segment, const int* table) {
  const int newest = segment.num_keys - 1;
  if (!has_newest(segment) || newest < 0) return -1;
  return rows.slot_mapping[segment.b] == layout.slot(table, newest) ? newest : -1;
}

// The making warps: rows of one segment after another, as buffers become free, for the computing
// warps; and to the pages, too, the keys and values of sequences without keys that have a place.
struct Maker {
  const FreshRows& rows;
  const PageLayout& layout;
  unsigned char* smem;
  int kv_head, group;

  // Heads of the newest token that are made at a time.
  static constexpr int kHeads = kMakers / FreshToken::kLanes;

  __device__ __forceinline__ int thread() const {
    return threadIdx.x - (kKeyWarps + 1) * kWarpSize;
  }
  __device__ __forceinline__ void make(const FreshPlan& plan) const {
#pragma unroll 1
    for (int head = thread() / FreshToken::kLanes; head - thread() / FreshToken::kLanes < group + 2;
         head += kHeads)
      FreshToken(rows, layout, plan, head).make(rows, smem);
  }

  __device__ __forceinline__ void run(const DecodeProblem& problem, Progress& progress,
                                      const int* block_tables, int64_t table_stride) const {
    pdl_wait();  // it writes the rows
    for_each_empty(problem, [&](int b) {
      if (rows.slot_mapping[b] >= 0) make(FreshPlan{b, kv_head, group, false, true, 0, -1});
    });
    QueryRing queries(smem_address(smem));
    while (progress.next(problem)) {
      const Segment& segment = progress.segment;
      const bool is_stored = has_newest(segment);
      const int key = fresh_key_of(rows, layout, segment, block_tables + segment.b * table_stride);
      queries.wait_empty();
      make(FreshPlan{segment.b, kv_head, group, true, is_stored, queries.q_at(),
                     queries.fresh_at()});
      if (thread() == 0) *reinterpret_cast<int*>(smem + queries.fresh_at() + 2 * kRowBytes) = key;
      mbarrier_arrive(queries.full());
      queries.advance();
    }
  }
};
