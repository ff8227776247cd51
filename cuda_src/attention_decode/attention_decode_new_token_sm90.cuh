// The newest token of a sequence in attention_decode_sm90 with NEW_TOKEN. Its queries, key and
// value are the raw output of the projection; norm, rotation and the store to the pages are fused
// here. The formulas are those of qk_norm_rope_store.cu, so the results are bit-identical.
#pragma once

#include "attention_decode/attention_decode_cta_sm90.cuh"
#include "attention_decode/attention_decode_pipeline_sm90.cuh"
#include "common/qk_head.cuh"

// The part of a new token that a CTA computes, and its destination in shared memory.
struct NewTokenTask {
  int b;
  bool has_queries;  // compute the group's queries
  bool has_kv;       // compute key and value, and store them to the pages
  int q_at;
  int new_kv_at;  // shared-memory offset; -1: store key and value to the pages only
};

// A thread's share of one row of a new token: two vectors of a query, key or value.
class NewTokenRow {
 public:
  static constexpr int kLanes = kHeadDim / (2 * kVec);  // number of adjacent lanes per row

  // Inputs that the preceding kernel does not write, so they may be loaded before pdl_wait.
  struct Inputs {
    Packed<kVec> weight[2];
    float cos[kVec], sin[kVec];
  };

  // Rows 0 to group - 1 are queries, row `group` is the key, row group + 1 the value.
  __device__ __forceinline__ NewTokenRow(const Cta& cta, const NewTokenTask& task, int row)
      : column_(threadIdx.x % kLanes * kVec), is_rotated_(row <= cta.p.group) {
    const AttentionDecodeSm90Params& p = cta.p;
    if (row < cta.p.group) {
      if (!task.has_queries) return;
      const int64_t head = static_cast<int64_t>(cta.kv_head()) * cta.p.group + row;
      from_ = p.q + task.b * p.q_stride_b + head * p.q_stride_h;
      weight_ = p.q_weight;
      to_ = task.q_at + row * kQueryPitch;
    } else if (row < cta.p.group + 2 && task.has_kv) {
      from_ = is_rotated_ ? p.new_k + task.b * p.k_stride_b + cta.kv_head() * p.k_stride_h
                          : p.new_v + task.b * p.v_stride_b + cta.kv_head() * p.v_stride_h;
      if (is_rotated_) weight_ = p.k_weight;
      if (task.new_kv_at >= 0) to_ = task.new_kv_at + (row - cta.p.group) * kPageRowBytes;
      if constexpr (kHasCodes) page_scale_ = (is_rotated_ ? p.k_scale : p.v_scale)[cta.kv_head()];
      const int64_t offset = cta.layout.offset(p.slot_mapping[task.b], cta.kv_head());
      if (offset >= 0) page_ = (is_rotated_ ? p.k_pages : p.v_pages) + offset + column_;
    }
    if (from_ != nullptr && is_rotated_) position_ = p.positions[task.b];
  }

  __device__ __forceinline__ Inputs inputs(const AttentionDecodeSm90Params& p) const {
    Inputs inputs{};
    load_weight(inputs.weight);
    load_angles_of_position(p, inputs.cos, inputs.sin);
    return inputs;
  }

  // Computes and stores the row; other threads may read it after a barrier. All lanes of a warp
  // must call it together.
  __device__ __forceinline__ void compute(const AttentionDecodeSm90Params& p, unsigned char* smem,
                                          const Inputs& inputs) const {
    Packed<kVec> raw[2] = {};
    if (from_ != nullptr) {
      raw[0] = load_packed<kVec>(from_ + column_);
      raw[1] = load_packed<kVec>(from_ + column_ + kHalf);
    }
    float x[2 * kVec];
    to_floats(raw[0], x);
    to_floats(raw[1], x + kVec);
    float scale = 0.0f;
    if (p.q_weight != nullptr || p.k_weight != nullptr)
      scale = norm_scale(head_sum_of_squares(x, kLanes), kHeadDim, p.eps);
    if (from_ == nullptr) return;
    if (weight_ != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Vec<scalar_t, kVec> weight = unpack<kVec>(inputs.weight[i]);
#pragma unroll
        for (int j = 0; j < kVec; ++j)
          x[i * kVec + j] = normed(x[i * kVec + j], scale, weight.v[j], p.weight_offset);
      }
    }
    if (is_rotated_) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) rotate_pair(x[j], x[kVec + j], inputs.cos[j], inputs.sin[j]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Vec<scalar_t, kVec> y = rounded(x + i * kVec);
      if constexpr (kHasCodes) {
        if (page_scale_ > 0.0f) {
          float values[kVec];
#pragma unroll
          for (int j = 0; j < kVec; ++j) values[j] = to_float(y.v[j]);
          const Vec<page_t, kVec> codes = to_page<kVec>(values, page_scale_);
          if (to_ >= 0)
            store_vec(reinterpret_cast<page_t*>(smem + to_) + column_ + i * kHalf, codes);
          if (page_ != nullptr) store_vec(page_ + i * kHalf, codes);
          continue;
        }
      }
      if (to_ >= 0) store_vec(reinterpret_cast<scalar_t*>(smem + to_) + column_ + i * kHalf, y);
      if (page_ != nullptr) store_vec(reinterpret_cast<scalar_t*>(page_) + i * kHalf, y);
    }
  }

 private:
  static constexpr int kHalf = kHeadDim / 2;

  int column_;
  bool is_rotated_;
  const scalar_t* from_ = nullptr;    // null: nothing to compute
  const scalar_t* weight_ = nullptr;  // norm weight, or null
  page_t* page_ = nullptr;            // destination in the pages, or null
  float page_scale_ = 0.0f;           // scale of a quantized key or value; 0 for a query
  int to_ = -1;                       // offset in shared memory, or -1
  int position_ = -1;

  __device__ __forceinline__ void load_weight(Packed<kVec> (&weight)[2]) const {
    if (weight_ == nullptr) return;
    weight[0] = load_packed<kVec>(weight_ + column_);
    weight[1] = load_packed<kVec>(weight_ + column_ + kHalf);
  }
  __device__ __forceinline__ void load_angles_of_position(const AttentionDecodeSm90Params& p,
                                                          float (&cos)[kVec],
                                                          float (&sin)[kVec]) const {
    const float* row = rotation_row(p.cos_sin, p.num_positions, kHeadDim, position_);
    load_rotation(row, kHeadDim, column_, cos, sin);
  }
};

// Returns whether a work tile contains its sequence's last key.
__device__ __forceinline__ bool has_last_key(const WorkTile& work) {
  return work.num_tiles > 0 && work.num_keys <= work.first_key + work.num_tiles * kTileKeys;
}

// Index of the new token's key if it is among a work tile's keys, or -1. If the token's slot is not
// the slot of the sequence's last key (or is outside the pages), the token is not a key of the
// sequence, and the last key is read from the pages.
__device__ __forceinline__ int new_key_of(const Cta& cta, const WorkTile& work) {
  const int last = work.num_keys - 1;
  if (!has_last_key(work) || last < 0) return -1;
  const int* table = cta.p.block_tables + work.b * cta.p.table_stride;
  return cta.p.slot_mapping[work.b] == cta.layout.slot(table, last) ? last : -1;
}

// The new-token warps. As buffers become free, they compute the rows of successive work tiles for
// the consumer warps; they load what they can before they wait. At the end they store the key and
// value of each sequence without keys whose slot is in the pages.
struct NewTokenProducer {
  const Cta& cta;

  static constexpr int kRowsAtOnce = kNewTokenThreads / NewTokenRow::kLanes;

  __device__ __forceinline__ static int thread() {
    return threadIdx.x - (kConsumerWarps + 1) * kWarpSize;
  }
  __device__ __forceinline__ void run(WarpSchedule& schedule) const {
    QueryRing queries(smem_address(cta.smem));
    EmptySequences empty;
    for (;;) {
      NewTokenTask task{0, false, true, 0, -1};
      int key = -1;
      if (schedule.next(cta.problem)) {
        const WorkTile& work = schedule.work;
        task = {work.b, true, has_last_key(work), queries.q_at(), queries.new_kv_at()};
        key = new_key_of(cta, work);
      } else {
        task.b = empty.next(cta.problem);
        if (task.b < 0) return;
        if (cta.p.slot_mapping[task.b] < 0) continue;
      }
      const int first = thread() / NewTokenRow::kLanes;
#pragma unroll 1
      for (int row = first; row - first < cta.p.group + 2; row += kRowsAtOnce) {
        const NewTokenRow own(cta, task, row);
        const NewTokenRow::Inputs inputs = own.inputs(cta.p);
        pdl_wait();  // the preceding kernel writes the rows
        if (task.has_queries) queries.wait_empty();
        own.compute(cta.p, cta.smem, inputs);
      }
      if (task.has_queries) {
        if (thread() == 0)
          *reinterpret_cast<int*>(cta.smem + queries.new_kv_at() + 2 * kPageRowBytes) = key;
        mbarrier_arrive(queries.full());
        queries.advance();
      }
    }
  }
};
