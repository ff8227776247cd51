// Result of a row, and its output with log-probabilities.
#pragma once

#include "sample/shared_walk.cuh"

constexpr int kOk = 0, kBadLogits = 1, kBadParameter = 2;

// Result of a row; the token is an id or one of these codes.
struct Result {
  int token;
  int num_listed;  // number of entries in s.sorted; negative: no list
  int kept;        // number of candidates in the draw
};
constexpr int kNoToken = -1, kBadLogitsToken = -2, kBadParameterToken = -3;

__device__ __forceinline__ void load_keys(const uint32_t* keys, int num_segments,
                                          uint32_t (&mine)[kKeysPerThread]) {
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) {
    const int segment = i * kThreads + static_cast<int>(threadIdx.x);
    mine[i] = segment < num_segments ? keys[segment] : 0;
  }
}

__device__ __forceinline__ uint32_t largest_key(const uint32_t (&keys)[kKeysPerThread],
                                                uint64_t* scratch) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) top = max(top, keys[i]);
  return block_max<kWarps>(top, scratch);
}

struct LogSum {
  float largest, log_sum;
};

// Returns the log-sum-exp of the row's raw logits, as the sum of two fields.
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

// Searches the row for its num_top largest logits, and lists them in s.sorted.
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

// Writes all requested outputs of row b.
__device__ __forceinline__ void write_result(const SampleChooseParams& p, const Result& result,
                                             int64_t b, ChooseShared& s) {
  const uint32_t* const keys = p.keys + b * 2 * kMaxSegments;
  const Tile* const tiles = p.tiles + b * p.num_tiles;
  int* const top_ids = p.top_ids + b * p.num_top;
  float* const top_logprobs = p.top_logprobs + b * p.num_top;
  const bool is_good = result.token >= 0;
  if (threadIdx.x == 0) {
    p.token_ids[b] = is_good ? result.token : -1;
    p.status[b] = is_good ? kOk : result.token == kBadLogitsToken ? kBadLogits : kBadParameter;
    p.num_kept[b] = result.kept;
  }
  if (p.num_top < 0) return;
  if (!is_good) {
    if (threadIdx.x == 0) p.logprobs[b] = nanf("");
    if (static_cast<int>(threadIdx.x) < p.num_top) {
      top_ids[threadIdx.x] = -1;
      top_logprobs[threadIdx.x] = nanf("");
    }
    return;
  }
  const Row raw = raw_row(p, b);
  const bool is_processed = is_changed(p, b);
  const LogSum all = log_sum_of(tiles, p.num_tiles, s.select.scratch);
  if (threadIdx.x == 0) p.logprobs[b] = raw.data[result.token] - all.largest - all.log_sum;
  if (p.num_top == 0) return;
  int num_listed = result.num_listed;
  if (is_processed || num_listed < 0) {  // no list, or a list of changed logits
    uint32_t mine[kKeysPerThread];
    load_keys(is_processed ? keys + kMaxSegments : keys, p.num_segments, mine);
    const uint32_t top = largest_key(mine, s.select.scratch);
    bool is_whole;
    num_listed = list_largest(raw, mine, top, p.num_top, p.shift, s, &is_whole);
  }
  if (num_listed < p.num_top) list_top(raw, p.num_top, s);
  if (static_cast<int>(threadIdx.x) < p.num_top) {
    const uint64_t order = s.sorted[threadIdx.x];
    top_ids[threadIdx.x] = id_of(order);
    top_logprobs[threadIdx.x] = logit_of(order) - all.largest - all.log_sum;
  }
}
