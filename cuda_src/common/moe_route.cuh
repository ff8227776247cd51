// Expert selection, and sorting (token, expert) pairs of a few tokens by expert within one block.
// Formulas: moe_route.cu.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kMaxTopK = 16;
constexpr int kMaskWords = 2;
constexpr int kMaskTokens = 32 * kMaskWords;    // maximum number of tokens per block sort
constexpr uint32_t kMinusInfKey = 0x007fffffu;  // key_of(-inf)

// With a shared expert (num_shared 1), expert E is the last one of every token, and column E of the
// logits is that of its gate. k is top_k + num_shared.
struct MoeRouteParams {
  const float* logits;        // (T, E + num_shared)
  const float* correction;    // (E,), or null
  const float* expert_scale;  // (E,) factor on each expert's weights, or null
  int* experts;               // (T, k)
  float* weights;             // (T, k)
  int* order;                 // (T * k,)
  int* offsets;               // (E + num_shared + 1,)
  const int64_t* slots;       // (T,), or null: tokens with a negative slot do not count in `load`
  int64_t* load;              // (E,) accumulated number of pairs per expert, or null
  int* counts;  // (chunks, E) pairs per token chunk and expert; unused with few tokens
  int num_tokens, num_experts, top_k;
  int num_shared;  // 0 or 1
  int is_sigmoid;
  int num_groups, top_groups;  // num_groups <= 32; 1: no expert groups
  int renormalize;
  float scale;
  int chunk_tokens;  // tokens per block; the last block takes the rest
  float jitter;      // of sparsemixer

  __device__ __forceinline__ int64_t first_pair(int token) const {
    return static_cast<int64_t>(token) * (top_k + num_shared);
  }
  __device__ __forceinline__ const float* logits_of(int token) const {
    return logits + static_cast<int64_t>(token) * (num_experts + num_shared);
  }
};

__device__ __forceinline__ float sigmoid(float x) { return __frcp_rn(1.0f + expf(-x)); }

// Maps a float to an unsigned key with the same order. 0 and -0 share a key; NaN maps to the lowest
// key, 1; no float maps to 0.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = x == 0.0f ? 0 : __float_as_uint(x);
  const uint32_t key = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return x != x ? 1 : key;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key >> 31 != 0 ? key ^ 0x80000000u : ~key);
}

// A lane's experts, i * 32 + lane. `key` ranks them; it is 0 if the expert does not exist or has
// already been chosen.
template <int kPer>
struct Ranked {
  float score[kPer];
  uint32_t key[kPer];
};

// Turns a row of logits into scores and ranking keys.
template <int kPer>
__device__ __forceinline__ void load_scores(const MoeRouteParams& p, int token, Ranked<kPer>& r) {
  const int lane_idx = threadIdx.x % kWarpSize;
  const float* row = p.logits_of(token);
  const auto exists = [&](int i) { return i * kWarpSize + lane_idx < p.num_experts; };
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    r.score[i] = exists(i) ? row[i * kWarpSize + lane_idx] : value_of(kMinusInfKey);
  if (p.is_sigmoid) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) r.score[i] = sigmoid(r.score[i]);
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

// Keeps the token's best groups of neighbouring experts; experts of other groups rank as -inf. Lane
// g ranks group g by its best expert or, with a correction, by the sum of its two best.
template <int kPer>
__device__ __forceinline__ void keep_best_groups(const MoeRouteParams& p, Ranked<kPer>& r) {
  const int lane_idx = threadIdx.x % kWarpSize, size = p.num_experts / p.num_groups;
  int group[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) group[i] = (i * kWarpSize + lane_idx) / size;
  uint32_t own = 0;
#pragma unroll 1
  for (int g = 0; g < p.num_groups; ++g) {
    uint32_t best = 0, second = 0;  // two highest keys among this lane's experts in the group
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

// Writes a token's experts and weights, given by lanes, and the place of its shared expert in
// `order`. `total` is the sum of the weights.
__device__ __forceinline__ void store_choice(const MoeRouteParams& p, int token, int expert,
                                             float weight, float total) {
  const int lane_idx = threadIdx.x % kWarpSize;
  if (lane_idx < p.top_k) {
    if (p.renormalize) weight /= total < 1e-20f ? 1e-20f : total;  // NaN stays NaN
    const int64_t pair = p.first_pair(token) + lane_idx;
    p.experts[pair] = expert;
    if (p.expert_scale != nullptr) weight *= p.expert_scale[expert];
    p.weights[pair] = weight * p.scale;
    if (p.load != nullptr && (p.slots == nullptr || p.slots[token] >= 0))
      atomicAdd(reinterpret_cast<unsigned long long*>(p.load + expert), 1ull);
  } else if (lane_idx < p.top_k + p.num_shared) {
    const int64_t pair = p.first_pair(token) + lane_idx;
    p.experts[pair] = p.num_experts;
    p.weights[pair] = sigmoid(p.logits_of(token)[p.num_experts]);
    p.order[p.num_tokens * p.top_k + token] = static_cast<int>(pair);  // its pairs come last
  }
}

// Sparsemixer, with one expert per lane: an expert's weight is its share among those that are left
// and whose logits are close to its own. Stores and returns as `choose`.
__device__ __forceinline__ int choose_close(const MoeRouteParams& p, int token) {
  const int lane_idx = threadIdx.x % kWarpSize;
  const bool exists = lane_idx < p.num_experts;
  const float logit = exists ? p.logits_of(token)[lane_idx] : 0.0f;
  uint32_t key = exists ? key_of(logit) : 0;
  int expert = 0;
  float weight = 0.0f;
#pragma unroll 1
  for (int rank = 0; rank < p.top_k; ++rank) {
    const uint32_t largest = __reduce_max_sync(kFullMask, key);
    const int winner = __ffs(static_cast<int>(__ballot_sync(kFullMask, key == largest))) - 1;
    const float best = __shfl_sync(kFullMask, logit, winner);
    const float limit = 2.0f * p.jitter * fmaxf(fabsf(logit), best);
    const bool is_far = key == 0 || best - logit > limit;
    const float sum = warp_sum(is_far ? 0.0f : expf(logit - best));
    if (lane_idx == rank) expert = winner, weight = 1.0f / sum;
    if (lane_idx == winner) key = 0;
  }
  store_choice(p, token, expert, weight, 1.0f);
  return expert;
}

// Returns a lane's largest key and its place among them; the first one, if keys are equal.
template <int kPer>
__device__ __forceinline__ uint32_t best_of(const uint32_t (&keys)[kPer], int& place) {
  uint32_t best[kPer];
  int places[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) best[i] = keys[i], places[i] = i;
#pragma unroll
  for (int step = 1; step < kPer; step *= 2)
#pragma unroll
    for (int i = 0; i + step < kPer; i += 2 * step)
      if (best[i + step] > best[i]) best[i] = best[i + step], places[i] = places[i + step];
  place = places[0];
  return best[0];
}

// Stores a token's experts and weights. Returns, in lane j < top_k, the j-th expert.
template <int kPer>
__device__ __forceinline__ int choose(const MoeRouteParams& p, int token) {
  const int lane_idx = threadIdx.x % kWarpSize;
  Ranked<kPer> r;
  load_scores(p, token, r);
  if (p.num_groups > 1) keep_best_groups(p, r);
  int expert = 0, winner = 0;
#pragma unroll 1
  for (int rank = 0; rank < p.top_k; ++rank) {
    if (lane_idx == rank - 1) expert = winner;  // only now, so that no round waits for the shuffle
    int place;
    const uint32_t best = best_of(r.key, place);
    const uint32_t largest = __reduce_max_sync(kFullMask, best);
    const unsigned own = place * kWarpSize + lane_idx;
    bool holds = best == largest;
    unsigned holders = __ballot_sync(kFullMask, holds);
    if ((holders & (holders - 1)) != 0) {  // several lanes: the lowest expert
      holds = __reduce_min_sync(kFullMask, holds ? own : ~0u) == own;
      holders = __ballot_sync(kFullMask, holds);
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (holds && i == place) r.key[i] = 0;
    // The winner is below num_experts: at least one key is nonzero because top_k <= num_experts.
    winner = __shfl_sync(kFullMask, own, __ffs(static_cast<int>(holders)) - 1);
  }
  if (lane_idx == p.top_k - 1) expert = winner;
  float weight = 0.0f, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const float score = __shfl_sync(kFullMask, r.score[i], expert % kWarpSize);
    if (expert / kWarpSize == i) weight = score;
  }
#pragma unroll 4
  for (int rank = 0; rank < p.top_k; ++rank) total += __shfl_sync(kFullMask, weight, rank);
  store_choice(p, token, expert, weight, total);
  return expert;
}

// For each expert, a bit mask of the kMaskTokens tokens that chose it.
template <int kPer>
struct TokenMasks {
  static constexpr int kExperts = kPer * kWarpSize;
  uint32_t words[kMaskWords][kExperts];

  __device__ __forceinline__ void clear(int expert) {
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w) words[w][expert] = 0;
  }
  __device__ __forceinline__ void add(int expert, int token) {
    atomicOr(&words[token / 32][expert], 1u << token % 32);
  }
  __device__ __forceinline__ int count(int expert) const {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w) sum += __popc(words[w][expert]);
    return sum;
  }
  // Number of tokens before `token` that chose the expert.
  __device__ __forceinline__ int rank(int expert, int token) const {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w) {
      const int bits = min(max(token - w * 32, 0), 32);  // bits of word w before `token`
      sum += __popc(words[w][expert] & (bits == 32 ? ~0u : (1u << bits) - 1));
    }
    return sum;
  }
  // Counts the tokens of this lane's experts lane * kPer + i, using vector accesses without bank
  // conflicts.
  __device__ __forceinline__ void count_own(int (&counts)[kPer]) const {
    constexpr int kWidth = kPer < 4 ? kPer : 4;
    const int first = threadIdx.x % kWarpSize * kPer;
#pragma unroll
    for (int i = 0; i < kPer; ++i) counts[i] = 0;
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w)
#pragma unroll
      for (int i = 0; i < kPer; i += kWidth) {
        const auto part = load_vec<uint32_t, kWidth>(&words[w][first + i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) counts[i + j] += __popc(part.v[j]);
      }
  }
};

// Exclusive prefix sum over a warp's counts (expert lane * kPer + i), in place.
template <int kPer>
__device__ __forceinline__ void sums_before(int (&counts)[kPer]) {
  const int lane_idx = threadIdx.x % kWarpSize;
  int own = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) own += counts[i];
  int before = own;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kFullMask, before, step);
    if (lane_idx >= step) before += other;
  }
  before -= own;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int count = counts[i];
    counts[i] = before;
    before += count;
  }
}

// Stores the index of each expert's first pair; `begins` is the result of sums_before.
template <int kPer>
__device__ __forceinline__ void store_offsets(const MoeRouteParams& p, const int (&begins)[kPer]) {
  const int lane_idx = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    if (lane_idx * kPer + i < p.num_experts) p.offsets[lane_idx * kPer + i] = begins[i];
  if (lane_idx <= p.num_shared)
    p.offsets[p.num_experts + lane_idx] = p.num_tokens * (p.top_k + lane_idx);
}

template <int kPer>
struct RouteShared {
  alignas(16) TokenMasks<kPer> masks;
  int experts[kMaskTokens][kMaxTopK];
};

// Sorts the pairs of up to kMaskTokens tokens whose experts and masks are in `shared`, in one block
// with any number of warps. A block barrier must precede it.
template <int kPer>
__device__ __forceinline__ void sort_few(const MoeRouteParams& p, const RouteShared<kPer>& shared) {
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  // Every warp computes this redundantly, which costs less than another barrier.
  int begins[kPer];
  shared.masks.count_own(begins);
  sums_before<kPer>(begins);
  if (warp_idx == 0) store_offsets<kPer>(p, begins);
#pragma unroll 1
  for (int token = warp_idx; token < p.num_tokens; token += blockDim.x / kWarpSize) {
    const int expert = lane_idx < p.top_k ? shared.experts[token][lane_idx] : 0;
    int begin = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int other = __shfl_sync(kFullMask, begins[i], expert / kPer);
      if (expert % kPer == i) begin = other;
    }
    if (lane_idx < p.top_k)
      p.order[begin + shared.masks.rank(expert, token)] =
          static_cast<int>(p.first_pair(token)) + lane_idx;
  }
}

// Sorts the pairs of one token, in a warp whose lane j < top_k holds the j-th expert.
template <int kPer>
__device__ __forceinline__ void sort_one(const MoeRouteParams& p, int expert) {
  const int lane_idx = threadIdx.x % kWarpSize;
  int before = 0, begins[kPer] = {};
#pragma unroll 4
  for (int rank = 0; rank < p.top_k; ++rank) {
    const int other = __shfl_sync(kFullMask, expert, rank);
    before += other < expert;
#pragma unroll
    for (int i = 0; i < kPer; ++i) begins[i] += other < lane_idx * kPer + i;
  }
  if (lane_idx < p.top_k) p.order[before] = lane_idx;
  store_offsets<kPer>(p, begins);
}

// Routes up to kMaskTokens tokens in one block with any number of warps. The masks must be zero,
// and a barrier must have made them and the logits visible.
template <int kPer, bool kMixes = false>
__device__ __forceinline__ void route_few(const MoeRouteParams& p, RouteShared<kPer>& shared) {
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
#pragma unroll 1
  for (int token = warp_idx; token < p.num_tokens; token += num_warps) {
    const int expert = kMixes ? choose_close(p, token) : choose<kPer>(p, token);
    if (lane_idx < p.top_k) {
      shared.experts[token][lane_idx] = expert;
      shared.masks.add(expert, token);
    }
  }
  __syncthreads();
  sort_few(p, shared);
}
