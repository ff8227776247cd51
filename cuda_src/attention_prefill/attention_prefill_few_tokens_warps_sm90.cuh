// The warps of attention_prefill_few_tokens_sm90. A row's sums have the order of
// attention_prefill_consumer_sm90.cuh: key tiles of the same size from the last to the first, the
// same softmax, and tensor-core products over the same 16 columns or keys at a time. For these,
// mma.sync and wgmma return the same bits in both 16-bit dtypes.
//
// P of a tile depends on earlier tiles only through the maxima of their scores, whatever the order
// in which these are found. So the score warps compute several tiles at once. Only the sums go from
// tile to tile: every value warp adds up its own columns of O.
#pragma once

#include "attention_prefill/attention_prefill_epilogue_sm90.cuh"
#include "attention_prefill/attention_prefill_new_token_sm90.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"

// The boxes that a loader's lanes copy: those of as many tiles as 32 lanes have boxes for. Their
// rows are read from the block table at once, one group of tiles ahead.
class Boxes {
 public:
  __device__ __forceinline__ Boxes(const Cta& cta, int warp_idx) : cta_(cta) {
    const int lane_idx = threadIdx.x % 32, boxes = kKeys / cta.problem.box_keys;
    tiles_ = 32 / boxes;
    turn_ = lane_idx / boxes;
    box_ = lane_idx - turn_ * boxes;
    t_ = warp_idx + turn_ * kLoaders;
    if (turn_ >= tiles_) turn_ = 32;
    now_ = tiles_;
    next_ = row_of_tile();
  }

  // The lane's box of the loader's next tile, or -1 if other lanes copy that tile.
  __device__ __forceinline__ int next() {
    if (now_ == tiles_) {
      now_ = 0;
      row = next_;
      t_ += tiles_ * kLoaders;
      next_ = row_of_tile();
    }
    return now_++ == turn_ ? box_ : -1;
  }

  int row = 0;  // first row of that box in the tensor map

 private:
  const Cta& cta_;
  int tiles_;  // tiles whose boxes 32 lanes have
  int turn_, box_, t_, now_, next_;

  __device__ __forceinline__ int row_of_tile() const {
    if (t_ >= cta_.num_tiles) return 0;
    return key_box_row<kKeys>(cta_.problem, cta_.tile, cta_.tile.end - 1 - t_, box_);
  }
};

// Loads every kLoaders-th key tile; warp 0 also loads Q, unless NewToken computes it.
__device__ __forceinline__ void load_queries_and_keys(const Cta& cta, int warp_idx,
                                                      const TensorMap* q_map,
                                                      const TensorMap* k_map) {
  const int lane_idx = threadIdx.x % 32;
  const FewTokensMemory& smem = cta.smem;
  const Problem& problem = cta.problem;
  Boxes boxes(cta, warp_idx);
  if (!kNewToken && warp_idx == 0) pdl_wait();
  if (!kNewToken && warp_idx == 0 && lane_idx == 0) {
    mbarrier_arrive_expect_tx(smem.q_full, problem.q_bytes);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      tma_load_4d(smem.q + chunk * kQChunk, q_map, 64 * chunk, 0, cta.tile.kv_head,
                  cta.tile.first_token, smem.q_full);
  }
  const int head = problem.block_tables == nullptr ? cta.tile.kv_head : 0;
  Ring ring(1);
  ring.advance(cta.stages, warp_idx);
  int of_warp = warp_idx;  // the score warp that takes the tile
  for (int t = warp_idx; t < cta.num_tiles; t += kLoaders) {
    const int box = boxes.next();
    const unsigned full = smem.k_full + 8 * of_warp;
    if (cta.tile.end - 1 - t >= cta.new_tile) pdl_wait();
    mbarrier_wait_to_overwrite(smem.k_empty + 8 * ring.stage, ring.phase);
    __syncwarp();
    if (lane_idx == 0) mbarrier_arrive_expect_tx(full, kKeyBytes);
    if (box >= 0) {
      const unsigned to = smem.k + ring.stage * kKeyBytes + box * problem.box_keys * 128;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        tma_load_3d(to + chunk * kKeyChunk, k_map, 64 * chunk, head, boxes.row, full);
    }
    ring.advance(cta.stages, kLoaders);
    of_warp = (of_warp + kLoaders) % kScoreWarps;
  }
}

// Loads the CTA's columns of V of every kLoaders-th tile.
__device__ __forceinline__ void load_values(const Cta& cta, int warp_idx, const TensorMap* v_map) {
  const int lane_idx = threadIdx.x % 32;
  const FewTokensMemory& smem = cta.smem;
  const Problem& problem = cta.problem;
  const int head = problem.block_tables == nullptr ? cta.tile.kv_head : 0;
  const int pitch = 2 * cta.value_chunk;
  Boxes boxes(cta, warp_idx);
  Ring ring(1);
  ring.advance(cta.stages, warp_idx);
  for (int t = warp_idx; t < cta.num_tiles; t += kLoaders) {
    const int box = boxes.next();
    const unsigned full = smem.v_full + 8 * ring.stage;
    if (cta.tile.end - 1 - t >= cta.new_tile) pdl_wait();
    mbarrier_wait_to_overwrite(smem.v_empty + 8 * ring.stage, ring.phase);
    __syncwarp();
    if (lane_idx == 0) mbarrier_arrive_expect_tx(full, cta.value_bytes);
    if (box >= 0) {
      unsigned to = smem.v + ring.stage * cta.value_bytes + box * problem.box_keys * pitch;
      for (int column = 0; column < cta.value_columns; column += cta.value_chunk) {
        tma_load_3d(to, v_map, cta.first_column + column, head, boxes.row, full);
        to += kKeys * pitch;
      }
    }
    ring.advance(cta.stages, kLoaders);
  }
}

// A score warp: S, maxima and P of every kScoreWarps-th tile.
template <bool kSoftcap>
class ScoreWarp {
 public:
  __device__ __forceinline__ ScoreWarp(const Cta& cta, const ScoreRule& rule)
      : cta_(cta), smem_(cta.smem), rule_(rule), lane_idx_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run(int warp_idx) {
    const int row = lane_idx_ / 4;
    const int tokens[2] = {row / cta_.problem.group, (row + 8) / cta_.problem.group};
    const KeyTileRange range =
        key_tile_range<kKeys>(cta_.problem, cta_.tile, 0, cta_.tile.tokens - 1);
    float tops[2] = {-kInf, -kInf};  // maxima of the first `seen` tiles
    int seen = 0;
    OnlineSoftmax<kKeys> softmax;
    mbarrier_wait(smem_.q_full, 0);
    const int stage = warp_idx % cta_.stages;  // kScoreWarps is a multiple of stages
    unsigned phase = 0;
    for (int t = warp_idx; t < cta_.num_tiles; t += kScoreWarps) {
      const int n = cta_.tile.end - 1 - t;
      float s[kKeys / 2];
      mbarrier_wait(smem_.k_full + 8 * warp_idx, phase);
      multiply_qk(s, smem_.k + stage * kKeyBytes);
      mbarrier_arrive(smem_.k_empty + 8 * stage);
      if constexpr (kSoftcap) {
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) s[i] = rule_.cap(s[i]);
      }
      if (n >= range.whole_end || n < range.whole_begin) {
        const int last = cta_.tile.last_key_of_first_token - n * kKeys - 2 * (lane_idx_ % 4);
        const int lasts[2] = {last + (cta_.problem.causal ? tokens[0] : 0),
                              last + (cta_.problem.causal ? tokens[1] : 0)};
        const unsigned reach[2] = {cta_.problem.reach, cta_.problem.reach};
        mask_scores<kKeys>(s, lasts, reach);
      }
      softmax.start();
      softmax.raise_to(tops, rule_.factor);
      float top[2];
      softmax.maxima(s, top);
      publish(t, top);
      read_tops(seen, t, tops);
      softmax.start();
      softmax.raise_to(tops, rule_.factor);
      softmax.raise_to(top, rule_.factor);
      softmax.sum[0] = softmax.sum[1] = 0.0f;
      unsigned p[kKeys / 16][4];
      softmax.exponentials(p, s, rule_.factor);
      store(t, p, softmax);
#pragma unroll
      for (int i = 0; i < 2; ++i) tops[i] = fmaxf(tops[i], top[i]);
      seen = t + 1;
      phase ^= 1;
    }
  }

 private:
  const Cta& cta_;
  const FewTokensMemory& smem_;
  ScoreRule rule_;
  int lane_idx_;

  // S = Q K^T of the key tile at shared address `keys`.
  __device__ __forceinline__ void multiply_qk(float (&scores)[kKeys / 2], unsigned keys) const {
    float s[kKeys / 8][4] = {};
    const int q_row = lane_idx_ % 16, k_row = lane_idx_ / 16 * 8 + lane_idx_ % 8;
    const unsigned q_from = smem_.q + q_row * 128, k_from = keys + k_row * 128;
    const unsigned q_swizzle = (lane_idx_ / 16 ^ q_row % 8) * 16;
    const unsigned k_swizzle = (lane_idx_ / 8 % 2 ^ k_row % 8) * 16;
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      unsigned q[4];
      ldmatrix_x4(q, q_from + i / 4 * kQChunk + (i % 4 * 32 ^ q_swizzle));
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        unsigned k[4];
        ldmatrix_x4(k, k_from + i / 4 * kKeyChunk + j * 16 * 128 + (i % 4 * 32 ^ k_swizzle));
        mma_m16n8k16<scalar_t>(s[2 * j], q, {k[0], k[1]});
        mma_m16n8k16<scalar_t>(s[2 * j + 1], q, {k[2], k[3]});
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) scores[i] = s[i / 4][i % 4];
  }

  // Stores the maxima of tile t's rows.
  __device__ __forceinline__ void publish(int t, const float (&top)[2]) const {
    const int index = TilePlace(t).index;
    if (lane_idx_ % 4 == 0)
      st_shared_v2(smem_.tops + index * kTopBytes + lane_idx_ / 4 * 8, top[0], top[1]);
    mbarrier_arrive(smem_.top_full + 8 * index);
  }

  // Raises `tops`, the maxima of the first `seen` tiles, to those of the first t.
  __device__ __forceinline__ void read_tops(int seen, int t, float (&tops)[2]) const {
    for (int i = seen; i < t; ++i) {
      const TilePlace place(i);
      mbarrier_wait(smem_.top_full + 8 * place.index, place.parity);
      const float2 top = ld_shared_v2(smem_.tops + place.index * kTopBytes + lane_idx_ / 4 * 8);
      tops[0] = fmaxf(tops[0], top.x);
      tops[1] = fmaxf(tops[1], top.y);
    }
  }

  // Stores P of tile t, and what the sums need.
  __device__ __forceinline__ void store(int t, const unsigned (&p)[kKeys / 16][4],
                                        const OnlineSoftmax<kKeys>& softmax) const {
    const int slot = t % kProbStages;
    const unsigned to = smem_.probs + slot * kProbBytes, of_lane = to + lane_idx_ * 16;
    if (t >= kProbStages) {
      const TilePlace before(t - kProbStages);
      mbarrier_wait(smem_.prob_used + 8 * before.index, before.parity);
    }
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j)
      st_shared_v4(of_lane + j * 512, p[j][0], p[j][1], p[j][2], p[j][3]);
    st_shared_v4(of_lane + kProbSums, softmax.sum[0], softmax.sum[1], softmax.rescale[0],
                 softmax.rescale[1]);
    if (lane_idx_ % 4 == 0)
      st_shared_v2(to + kProbBases + lane_idx_ / 4 * 8, softmax.base[0], softmax.base[1]);
    mbarrier_arrive(smem_.prob_full + 8 * slot);
  }
};

// A value warp: O of kColumns columns, over all tiles. Once the products of a tile have read their
// operands, it loads those of the next tile into the same registers.
class ValueWarp {
 public:
  __device__ __forceinline__ ValueWarp(const Cta& cta, int warp_idx)
      : cta_(cta),
        smem_(cta.smem),
        warp_idx_(warp_idx),
        lane_idx_(threadIdx.x % 32),
        pitch_(2 * cta.value_chunk) {
    const int row = lane_idx_ % 16, column = warp_idx * kColumns;
    const int swizzle = cta.value_chunk == 64 ? row % 8 : row / 2 % 4;
    const int chunk = column / cta.value_chunk, rest = column - chunk * cta.value_chunk;
#pragma unroll
    for (int d = 0; d < kColumns / 16; ++d) {
      const int word = rest / 8 + 2 * d + lane_idx_ / 16;  // in words of 16 bytes
      offsets_[d] = (chunk * kKeys + row) * pitch_ + (word ^ swizzle) * 16;
    }
  }

  __device__ __forceinline__ void run(Epilogue epilogue, const NewTokens& new_tokens) {
    if constexpr (kNewToken) {
      NewToken(cta_, new_tokens).run(warp_idx_ * 32 + lane_idx_, cta_.value_columns);
      mbarrier_arrive(smem_.q_full);
    }
    pdl_wait();  // the preceding kernel may read what the result overwrites
    float base[2] = {kInf, kInf};
    if (cta_.num_tiles > 0) {
      load_first();
      for (int t = 0; t < cta_.num_tiles - 1; ++t) multiply<true>(t);
      const float2 last =
          ld_shared_v2(smem_.probs + probs_.stage * kProbBytes + kProbBases + lane_idx_ / 4 * 8);
      base[0] = last.x;
      base[1] = last.y;
      multiply<false>(cta_.num_tiles - 1);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] += __shfl_xor_sync(~0u, sum_[i], 1);
      sum_[i] += __shfl_xor_sync(~0u, sum_[i], 2);
    }
    float o[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o[i] = o_[i / 4][i % 4];
    const int row = lane_idx_ / 4;
    const int first_column = cta_.first_column + warp_idx_ * kColumns;
    const int tokens[2] = {row / cta_.problem.group, (row + 8) / cta_.problem.group};
    epilogue.out += first_column;
    epilogue.value_dim -= first_column;
    if (first_column > 0) epilogue.lse = nullptr;
    epilogue(cta_.tile, row, tokens, lane_idx_, o, base, sum_);
  }

 private:
  const Cta& cta_;
  const FewTokensMemory& smem_;
  int warp_idx_, lane_idx_;
  int pitch_;                   // bytes of a row of V
  int offsets_[kColumns / 16];  // where the lane's row of V is, for every 16 columns
  Ring values_{0}, probs_{0};   // of the tile in registers
  unsigned v_[kKeys / 16][kColumns / 16][4];
  unsigned p_[kKeys / 16][4];
  float total_[2], rescale_[2];
  float o_[kColumns / 8][4] = {};
  float sum_[2] = {0.0f, 0.0f};

  // Loads 16 keys of V and P as operands.
  __device__ __forceinline__ void load(int j, unsigned values, unsigned probs) {
#pragma unroll
    for (int d = 0; d < kColumns / 16; ++d)
      ldmatrix_x4_trans(v_[j][d], values + offsets_[d] + j * 16 * pitch_);
    ld_shared_v4(probs + j * 512 + lane_idx_ * 16, p_[j][0], p_[j][1], p_[j][2], p_[j][3]);
  }
  __device__ __forceinline__ void load_factors(unsigned probs) {
    unsigned x[4];
    ld_shared_v4(probs + kProbSums + lane_idx_ * 16, x[0], x[1], x[2], x[3]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total_[i] = __uint_as_float(x[i]);
      rescale_[i] = __uint_as_float(x[2 + i]);
    }
  }
  __device__ __forceinline__ unsigned values_at(const Ring& ring) const {
    return smem_.v + ring.stage * cta_.value_bytes;
  }
  __device__ __forceinline__ unsigned probs_at(const Ring& ring) const {
    return smem_.probs + ring.stage * kProbBytes;
  }
  __device__ __forceinline__ void wait(const Ring& values, const Ring& probs) const {
    mbarrier_wait(smem_.v_full + 8 * values.stage, values.phase);
    mbarrier_wait(smem_.prob_full + 8 * probs.stage, probs.phase);
  }

  // Releases tile t's stage of V and place of P, which are in registers.
  __device__ __forceinline__ void release(int t) const {
    mbarrier_arrive(smem_.v_empty + 8 * values_.stage);
    mbarrier_arrive(smem_.prob_used + 8 * TilePlace(t).index);
  }

  // Loads the operands of tile 0, whose V may have a tail.
  __device__ __forceinline__ void load_first() {
    wait(values_, probs_);
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) load(j, values_at(values_), probs_at(probs_));
    load_factors(probs_at(probs_));
    release(0);
    const int valid = cta_.tile.num_keys - (cta_.tile.end - 1) * kKeys;
    if (valid >= kKeys) return;
    // P is 0 from there on, but 0 * NaN would reach the sum.
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j)
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int left = valid - (16 * j + m % 2 * 8 + 2 * (lane_idx_ % 4));
        const unsigned kept = left >= 2 ? ~0u : left == 1 ? 0xffffu : 0u;
#pragma unroll
        for (int d = 0; d < kColumns / 16; ++d) v_[j][d][m] &= kept;
      }
  }

  // Adds P V of tile t, whose operands are in registers, to O. With kHasNext it also loads the
  // operands of tile t + 1.
  template <bool kHasNext>
  __device__ __forceinline__ void multiply(int t) {
    Ring next_values = values_, next_probs = probs_;
    if constexpr (kHasNext) {
      next_values.advance(cta_.stages, 1);
      next_probs.advance(kProbStages, 1);
      wait(next_values, next_probs);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum_[i] = fmaf(sum_[i], rescale_[i], total_[i]);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o_[i / 4][i % 4] *= rescale_[i / 2 % 2];
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
#pragma unroll
      for (int d = 0; d < kColumns / 16; ++d) {
        mma_m16n8k16<scalar_t>(o_[2 * d], p_[j], {v_[j][d][0], v_[j][d][1]});
        mma_m16n8k16<scalar_t>(o_[2 * d + 1], p_[j], {v_[j][d][2], v_[j][d][3]});
      }
      if constexpr (kHasNext) load(j, values_at(next_values), probs_at(next_probs));
    }
    if constexpr (kHasNext) {
      load_factors(probs_at(next_probs));
      values_ = next_values;
      probs_ = next_probs;
      release(t + 1);
    }
  }
};
