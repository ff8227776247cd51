// The choice of a token's experts, by one warp.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kMaxTopK = 16;
constexpr uint32_t kMinusInfKey = 0x007fffffu;  // key_of(-inf)

// How experts are chosen from a row of logits.
struct MoeRule {
  const float* logits;      // (T, E)
  const float* correction;  // (E,), or null
  int num_experts, top_k;
  bool is_sigmoid, renormalize;
  int num_groups, top_groups;  // num_groups <= 32; 1: no groups
  float scale;
};

// Of a token's j-th expert, in lane j < top_k.
struct MoeChoice {
  int expert;
  float weight;
};

// Larger for larger x. 0 and -0 have one key; NaN has the lowest, 1; no float has 0.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = x == 0.0f ? 0 : __float_as_uint(x);
  const uint32_t key = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return x != x ? 1 : key;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key >> 31 != 0 ? key ^ 0x80000000u : ~key);
}

// Of a lane's experts: i * 32 + lane. `key` ranks them, 0 if they do not exist or are taken.
template <int kPer>
struct Ranked {
  float score[kPer];
  uint32_t key[kPer];
};

// Turns a row of logits into scores and their ranks.
template <int kPer>
__device__ __forceinline__ void load_scores(const MoeRule& p, int token, Ranked<kPer>& r) {
  const int lane_idx = threadIdx.x % kWarpSize;
  const float* row = p.logits + static_cast<int64_t>(token) * p.num_experts;
  const auto exists = [&](int i) { return i * kWarpSize + lane_idx < p.num_experts; };
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    r.score[i] = exists(i) ? row[i * kWarpSize + lane_idx] : value_of(kMinusInfKey);
  if (p.is_sigmoid) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) r.score[i] = __frcp_rn(1.0f + expf(-r.score[i]));
  } else {
    float largest = r.score[0], sum = 0.0f;
#pragma unroll
    for (int i = 1; i < kPer; ++i) largest = fmaxf(largest, r.score[i]);
    largest = value_of(__reduce_max_sync(kFullMask, key_of(largest)));
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      r.score[i] = exists(i) ? expf(r.score[i] - largest) : 0.0f;
      sum += r.score[i];
    }
    const float scale = 1.0f / warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kPer; ++i) r.score[i] *= scale;
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    float rank = r.score[i];
    if (p.correction != nullptr && exists(i)) rank += p.correction[i * kWarpSize + lane_idx];
    r.key[i] = exists(i) ? key_of(rank) : 0;
  }
}

// Leaves the token's best groups of neighbouring experts; the others rank as -inf. Lane g has group
// g: a group's rank is its best expert's, or with a correction the sum of its two best.
template <int kPer>
__device__ __forceinline__ void keep_best_groups(const MoeRule& p, Ranked<kPer>& r) {
  const int lane_idx = threadIdx.x % kWarpSize, size = p.num_experts / p.num_groups;
  int group[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) group[i] = (i * kWarpSize + lane_idx) / size;
  uint32_t own = 0;
#pragma unroll 1
  for (int g = 0; g < p.num_groups; ++g) {
    uint32_t best = 0, second = 0;  // of this lane's experts in the group
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (group[i] != g) continue;
      second = max(second, min(best, r.key[i]));
      best = max(best, r.key[i]);
    }
    const uint32_t largest = __reduce_max_sync(kFullMask, best);
    float value = value_of(largest);
    if (p.correction != nullptr) {
      const unsigned holders = __ballot_sync(kFullMask, best == largest);
      const bool is_first = lane_idx == __ffs(static_cast<int>(holders)) - 1;
      value += value_of(__reduce_max_sync(kFullMask, is_first ? second : best));
    }
    if (lane_idx == g) own = key_of(value);
  }
  int better = 0;
#pragma unroll 1
  for (int g = 0; g < p.num_groups; ++g) {
    const uint32_t other = __shfl_sync(kFullMask, own, g);
    better += other > own || (other == own && g < lane_idx);
  }
  const bool is_kept = lane_idx < p.num_groups && better < p.top_groups;
  const unsigned kept = __ballot_sync(kFullMask, is_kept);
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (r.key[i] != 0 && (kept >> group[i] & 1) == 0) r.key[i] = kMinusInfKey;
}

template <int kPer>
__device__ __forceinline__ MoeChoice choose(const MoeRule& p, int token) {
  const int lane_idx = threadIdx.x % kWarpSize;
  Ranked<kPer> r;
  load_scores(p, token, r);
  if (p.num_groups > 1) keep_best_groups(p, r);
  int expert = 0;
  float weight = 0.0f, total = 0.0f;
#pragma unroll 1
  for (int rank = 0; rank < p.top_k; ++rank) {
    uint32_t best = r.key[0];
    int place = 0;
#pragma unroll
    for (int i = 1; i < kPer; ++i) {
      if (r.key[i] > best) best = r.key[i], place = i;
    }
    const uint32_t largest = __reduce_max_sync(kFullMask, best);
    const unsigned own = place * kWarpSize + lane_idx;
    // Below num_experts: at least one of its keys is not 0, as top_k <= num_experts.
    const int winner = __reduce_min_sync(kFullMask, best == largest ? own : ~0u);
    float score = r.score[0];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (i == winner / kWarpSize) {
        score = r.score[i];
        if (lane_idx == winner % kWarpSize) r.key[i] = 0;
      }
    }
    score = __shfl_sync(kFullMask, score, winner % kWarpSize);
    total += score;
    if (lane_idx == rank) expert = winner, weight = score;
  }
  if (p.renormalize) weight /= total < 1e-20f ? 1e-20f : total;  // a NaN stays
  return {expert, weight * p.scale};
}
