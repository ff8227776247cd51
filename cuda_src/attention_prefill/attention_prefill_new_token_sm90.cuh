// The newest token of each sequence in attention_prefill_few_tokens_sm90 with NEW_TOKEN. Its q, k
// and v are raw output of the projection: the value warps, which have nothing to do until the first
// P, normalise and rotate them with the bits of qk_norm_rope_store.cu. Queries go to shared memory;
// key and value to the pages and, since TMA has copied the last key tile before that, to its row
// there.
#pragma once

#include "attention_prefill/attention_prefill_few_tokens_cta_sm90.cuh"
#include "common/pdl.cuh"
#include "common/qk_head.cuh"

// Strides are in elements: _b between sequences, _h between heads.
struct NewTokens {
  const scalar_t *q, *k, *v;            // (B, H, D), (B, K, D) twice
  const int* positions;                 // (B,)
  const float* cos_sin;                 // (num_positions, D)
  const int64_t* slot_mapping;          // (B,)
  const scalar_t *q_weight, *k_weight;  // (D,) or null
  scalar_t *k_pages, *v_pages;
  int64_t q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h;
  int num_positions;
  int row_elements;  // elements of a page row
  float eps, weight_offset;
};

class NewToken {
 public:
  __device__ __forceinline__ NewToken(const Cta& cta, const NewTokens& tokens)
      : cta_(cta), tokens_(tokens), b_(cta.tile.first_token) {
    const Problem& problem = cta.problem;
    const int64_t slot = tokens.slot_mapping[b_];
    const int64_t num_slots = static_cast<int64_t>(problem.num_blocks) << problem.block_shift;
    if (slot >= 0 && slot < num_slots) {
      const int64_t row = (slot >> problem.block_shift) * problem.page_rows +
                          static_cast<int64_t>(cta.tile.kv_head) * problem.head_rows +
                          (slot & ((1 << problem.block_shift) - 1)) * problem.token_rows;
      page_ = row * tokens.row_elements;
    }
    // If the slot is not that of the last key, the token is not a key of its sequence.
    const int last = cta.tile.num_keys - 1;
    if (cta.num_tiles == 0 || last < 0) return;
    const unsigned id = static_cast<unsigned>(cta.tile.table[last >> problem.block_shift]);
    const int64_t page = min(id, static_cast<unsigned>(problem.num_blocks - 1));
    const int within = last & ((1 << problem.block_shift) - 1);
    if (slot == (page << problem.block_shift) + within) key_ = last - (cta.tile.end - 1) * kKeys;
  }

  // Computes and stores all rows: the queries, then the key, then the value. `thread` of `threads`,
  // whole warps. Other warps may read them once all these threads have arrived on q_full.
  __device__ __forceinline__ void run(int thread, int threads) const {
    const int first = thread / kLanes, group = cta_.problem.group;
#pragma unroll 1
    for (int row = first; row - first < group + 2; row += threads / kLanes)
      compute(row, thread % kLanes * kVec);
  }

 private:
  static constexpr int kLanes = kHeadDim / (2 * kVec);  // neighbouring lanes that hold a row
  static constexpr int kHalf = kHeadDim / 2;
  static_assert(!kNewToken || kLanes == 4 || kLanes == 8, "whole rows within a warp");

  const Cta& cta_;
  const NewTokens& tokens_;
  int b_;
  int64_t page_ = -1;  // offset in the pages, or -1
  int key_ = -1;       // row of the last key tile, or -1

  __device__ __forceinline__ void compute(int row, int column) const {
    const int group = cta_.problem.group, kv_head = cta_.tile.kv_head;
    const bool is_query = row < group, is_key = row == group, exists = row < group + 2;
    const scalar_t *from = nullptr, *weight = nullptr;
    if (is_query) {
      const int64_t head = static_cast<int64_t>(kv_head) * group + row;
      from = tokens_.q + b_ * tokens_.q_stride_b + head * tokens_.q_stride_h;
      weight = tokens_.q_weight;
    } else if (is_key) {
      from = tokens_.k + b_ * tokens_.k_stride_b + kv_head * tokens_.k_stride_h;
      weight = tokens_.k_weight;
    } else if (exists) {
      from = tokens_.v + b_ * tokens_.v_stride_b + kv_head * tokens_.v_stride_h;
    }
    const bool is_rotated = is_query || is_key;
    float cos[kVec], sin[kVec];
    const int position = is_rotated ? tokens_.positions[b_] : -1;
    load_rotation(rotation_row(tokens_.cos_sin, tokens_.num_positions, kHeadDim, position),
                  kHeadDim, column, cos, sin);
    Packed<kVec> weights[2] = {};
    if (weight != nullptr) {
      weights[0] = load_packed<kVec>(weight + column);
      weights[1] = load_packed<kVec>(weight + column + kHalf);
    }
    pdl_wait();  // the preceding kernel writes the rows
    Packed<kVec> raw[2] = {};
    if (exists) {
      raw[0] = load_packed<kVec>(from + column);
      raw[1] = load_packed<kVec>(from + column + kHalf);
    }
    float x[2 * kVec];
    to_floats(raw[0], x);
    to_floats(raw[1], x + kVec);
    float scale = 0.0f;
    if (tokens_.q_weight != nullptr || tokens_.k_weight != nullptr)
      scale = norm_scale(head_sum_of_squares(x, kLanes), kHeadDim, tokens_.eps);
    if (!exists) return;
    if (weight != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Vec<scalar_t, kVec> w = unpack<kVec>(weights[i]);
#pragma unroll
        for (int j = 0; j < kVec; ++j)
          x[i * kVec + j] = normed(x[i * kVec + j], scale, w.v[j], tokens_.weight_offset);
      }
    }
    if (is_rotated) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) rotate_pair(x[j], x[kVec + j], cos[j], sin[j]);
    }
    // SAFETY: the row of the last key tile is overwritten once TMA has written it.
    if (!is_query && key_ >= 0) mbarrier_wait(is_key ? cta_.smem.k_full : cta_.smem.v_full, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) store(row, column + i * kHalf, rounded(x + i * kVec));
  }

  // Stores 16 bytes from column `column` on. One CTA of a pair stores to the pages.
  __device__ __forceinline__ void store(int row, int column, const Vec<scalar_t, kVec>& y) const {
    const int group = cta_.problem.group;
    const uint4 words = *reinterpret_cast<const uint4*>(&y);
    if (row < group) {
      const unsigned place = (column % 64 / 8 ^ row % 8) * 16;
      st_shared_v4(cta_.smem.q + column / 64 * kQChunk + row * 128 + place, words.x, words.y,
                   words.z, words.w);
      return;
    }
    const bool is_key = row == group;
    if (page_ >= 0 && blockIdx.x == 0)
      store_vec((is_key ? tokens_.k_pages : tokens_.v_pages) + page_ + column, y);
    if (key_ < 0) return;
    unsigned to;
    if (is_key) {
      to = cta_.smem.k + column / 64 * kKeyChunk + key_ * 128 + (column % 64 / 8 ^ key_ % 8) * 16;
    } else {
      const int own = column - cta_.first_column, width = cta_.value_chunk;
      if (own < 0 || own >= cta_.value_columns) return;
      const int swizzle = width == 64 ? key_ % 8 : key_ / 2 % 4;
      to =
          cta_.smem.v + (own / width * kKeys + key_) * 2 * width + (own % width / 8 ^ swizzle) * 16;
    }
    st_shared_v4(to, words.x, words.y, words.z, words.w);
    fence_async_proxy();  // SAFETY: TMA will overwrite this stage with a later tile
  }
};
