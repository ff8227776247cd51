// Last part of sampling: what is written of a row, its log-probabilities among it.
#pragma once

#include "sample/row_team.cuh"

constexpr int kOk = 0, kBadLogits = 1, kBadParameter = 2;

// What is known of a row; the token is one of these where it is not an id.
struct Result {
  int token, num_listed, kept;  // num_listed: of s.sorted; negative: there is no list
};
constexpr int kNoToken = -1, kBadLogitsToken = -2, kBadParameterToken = -3;

__device__ __forceinline__ void load_keys(const uint32_t* keys, int num_segments,
                                          uint32_t (&mine)[kKeys]) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int segment = i * kThreads + static_cast<int>(threadIdx.x);
    mine[i] = segment < num_segments ? keys[segment] : 0;
  }
}

__device__ __forceinline__ uint32_t largest_key(const uint32_t (&keys)[kKeys], uint64_t* scratch) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) top = max(top, keys[i]);
  return block_max<kWarps>(top, scratch);
}

struct LogSum {
  float largest, log_sum;
};

// Logarithm of the sum of exponentials of the row's raw logits, in two parts.
__device__ LogSum log_sum_of(const Tile* tiles, int num_tiles, uint64_t* scratch) {
  float largest = minus_inf(), sum = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
    largest = fmaxf(largest, tiles[i].raw_largest);
  }
  largest = block_reduce<kWarps>(largest, Max<float>(), scratch);
#pragma unroll 1
  for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
    const float own = tiles[i].raw_sum;
    if (own > 0.0f) sum += own * expf(tiles[i].raw_largest - largest);
  }
  return LogSum{largest, logf(block_reduce<kWarps>(sum, Sum<float>(), scratch))};
}

// Puts the num_top largest logits of the row into s.sorted by a search of the row.
__device__ void list_top(const Row& row, int num_top, ChooseShared& s) {
  const uint64_t threshold =
      select_order<kWarps>(row, [](uint64_t, float) -> uint64_t { return 1; }, num_top, s.select);
  if (threadIdx.x == 0) s.size = 0;
  __syncthreads();
  for_each_id(row, [&](float logit, int id) {
    const uint64_t order = order_of(logit, id);
    if (order >= threshold) s.list[atomicAdd(&s.size, 1)] = order;
  });
  __syncthreads();
  sort_list(num_top, s);
}

struct OutputPointers {  // of one row
  int *token_id, *status, *num_kept;
  float* logprob;
  int* top_ids;
  float* top_logprobs;
};

__device__ __forceinline__ void write_result(const Result& result, const OutputPointers& out,
                                             const Batch& batch, int64_t b, int num_top,
                                             int num_tiles, int num_segments, int shift,
                                             const uint32_t* keys, const Tile* tiles,
                                             ChooseShared& s) {
  const bool is_good = result.token >= 0;
  if (threadIdx.x == 0) {
    *out.token_id = is_good ? result.token : -1;
    *out.status = is_good ? kOk : result.token == kBadLogitsToken ? kBadLogits : kBadParameter;
    *out.num_kept = result.kept;
  }
  if (num_top < 0) return;
  if (!is_good) {
    if (threadIdx.x == 0) *out.logprob = nanf("");
    if (static_cast<int>(threadIdx.x) < num_top) {
      out.top_ids[threadIdx.x] = -1;
      out.top_logprobs[threadIdx.x] = nanf("");
    }
    return;
  }
  const Row raw = batch.raw(b);
  const bool is_changed = batch.is_changed(b);
  const LogSum all = log_sum_of(tiles, num_tiles, s.select.scratch);
  if (threadIdx.x == 0) *out.logprob = raw.data[result.token] - all.largest - all.log_sum;
  if (num_top == 0) return;
  int num_listed = result.num_listed;
  if (is_changed || num_listed < 0) {  // no list, or one of the changed logits
    uint32_t mine[kKeys];
    load_keys(is_changed ? keys + kMaxSegments : keys, num_segments, mine);
    const uint32_t top = largest_key(mine, s.select.scratch);
    bool is_whole;
    num_listed = list_largest(raw, mine, top, num_top, shift, s, &is_whole);
  }
  if (num_listed < num_top) list_top(raw, num_top, s);
  if (static_cast<int>(threadIdx.x) < num_top) {
    const uint64_t order = s.sorted[threadIdx.x];
    out.top_ids[threadIdx.x] = id_of(order);
    out.top_logprobs[threadIdx.x] = logit_of(order) - all.largest - all.log_sum;
  }
}
