// Second stage of sampling: cut the candidates of one row, and draw one of them.
//
// The fast way works on the merged lists of the row's chunks (common/chunk_lists.cuh), sorted in
// shared memory; the other way searches the row itself (common/row_select.cuh).
#pragma once

#include "common/block.cuh"
#include "common/chunk_lists.cuh"
#include "common/exact_math.cuh"
#include "common/philox.cuh"
#include "common/row_select.cuh"
#include "common/types.cuh"

constexpr int kThreads = 512;  // one block a row
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxCandidates = kThreads;  // of the merged lists of a row
constexpr int kMinMerged = 256;           // so many are taken of them, if there are more
constexpr uint32_t kWholeShare = 1u << 24;
constexpr float kFloatMax = 3.402823466e38f;

// What decides the draw of one row.
struct Job {
  Row row;
  float largest, scale;  // x = (logit - largest) * scale
  float lowest_x;        // candidates have at least this x
  int top_k;             // 0: no limit
  uint32_t share;        // top_p in steps of 2^-24
  uint64_t seed, position;

  __device__ __forceinline__ float x(float logit) const {
    return __fmul_rn(__fsub_rn(logit, largest), scale);
  }
};

__device__ Job make_job(Row row, uint64_t best, float temperature, int top_k, float top_p,
                        float min_p, uint64_t seed, int64_t position) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kTiny = 1.17549435e-38f;
  Job job{row};
  job.largest = logit_of(best);
  job.scale = fminf(__fdiv_rn(kLog2E, temperature), kFloatMax);
  job.lowest_x = -kMassBits;
  if (min_p > 0.0f) job.lowest_x = fmaxf(job.lowest_x, exact_log2(fmaxf(min_p, kTiny)));
  job.top_k = top_k > 0 && top_k < row.size ? top_k : 0;
  job.share = static_cast<uint32_t>(ceilf(top_p * kWholeShare));
  job.seed = seed;
  job.position = static_cast<uint64_t>(position);
  return job;
}

struct ChooseShared {
  SelectShared select;
  uint64_t list[kMaxCandidates];
  int size;
  bool is_whole, is_last;
};

// Scores are numbers as order_of gives them: the largest wins, of equal ones the lowest id.
__device__ __forceinline__ uint64_t score_of(float x, float noise, int id) {
  return order_of(__fadd_rn(x, noise), id);
}

// Calls body(order) for every listed logit of the row from `bound` up.
template <typename Body>
__device__ __forceinline__ void for_each_listed(const Chunk* chunks, const uint64_t* listed,
                                                int num_chunks, uint32_t bound, Body body) {
  for (int chunk = threadIdx.x / kWarpSize; chunk < num_chunks; chunk += kWarps) {
    const int n = chunks[chunk].num_listed;
    for (int i = threadIdx.x % kWarpSize; i < n; i += kWarpSize) {
      const uint64_t order = listed[chunk * kMaxListed + i];
      if (key_of(order) >= bound) body(order);
    }
  }
}

// Merges the chunks' lists into s.list, descending: a beginning of the row's order, of at least
// min(wanted, kMinMerged, all) logits. s.is_whole tells whether it holds all but those of -inf.
// Returns how many, or -1 if a list is missing or there are too many ties.
__device__ int merge_lists(const Chunk* chunks, const uint64_t* listed, int num_chunks,
                           uint32_t bound, float largest, int wanted, ChooseShared& s) {
  if (bound == kNoList) return -1;
  int n = 0;
  float low = largest;
  for_each_listed(chunks, listed, num_chunks, bound, [&](uint64_t order) {
    low = fminf(low, logit_of(order));
    ++n;
  });
  n = block_reduce<kWarps>(n, Sum<int>(), s.select.scratch);
  low = block_reduce<kWarps>(low, Min<float>(), s.select.scratch);
  int last_bin = kThreads;
  if (n > kMaxCandidates) {  // take the largest of them: fewer, but no fewer than wanted
    int* bins = reinterpret_cast<int*>(s.select.bins.count);
    bins[threadIdx.x] = 0;
    __syncthreads();
    for_each_listed(chunks, listed, num_chunks, bound, [&](uint64_t order) {
      atomicAdd(&bins[linear_bin<kThreads>(logit_of(order), low, largest)], 1);
    });
    __syncthreads();
    wanted = min(max(wanted, kMinMerged), kMaxCandidates);
    last_bin = bin_reaching<kWarps>(bins, wanted, s.select.scratch, &s.size);
  }
  if (threadIdx.x == 0) {
    s.is_whole = bound == 0 && n <= kMaxCandidates;
    s.size = 0;
  }
  __syncthreads();
  for_each_listed(chunks, listed, num_chunks, bound, [&](uint64_t order) {
    if (linear_bin<kThreads>(logit_of(order), low, largest) > last_bin) return;
    const int place = atomicAdd(&s.size, 1);
    if (place < kMaxCandidates) s.list[place] = order;
  });
  __syncthreads();
  n = s.size;
  if (n > kMaxCandidates) return -1;
  block_sort_descending(s.list, n);
  return n;
}

// Sum of the masses of the row's candidates from `threshold` up, and their number.
__device__ uint64_t row_mass(const Job& job, uint64_t threshold, uint64_t* scratch, int* count) {
  uint64_t sum = 0;
  int n = 0;
  for_each_id(job.row, [&](float logit, int id) {
    const float x = job.x(logit);
    if (x >= job.lowest_x && order_of(logit, id) >= threshold) {
      sum += mass(x);
      ++n;
    }
  });
  *count = block_reduce<kWarps>(n, Sum<int>(), scratch);
  return block_reduce<kWarps>(sum, Sum<uint64_t>(), scratch);
}

// Cuts the n sorted entries of s.list; returns how many stay, or -1 if the cut may lie behind the
// list.
__device__ int cut_list(const Job& job, int n, ChooseShared& s) {
  const int i = static_cast<int>(threadIdx.x);
  const float x = i < n ? job.x(logit_of(s.list[i])) : minus_inf();
  const int num_candidates = __syncthreads_count(x >= job.lowest_x);
  const bool is_limited = job.top_k > 0 && job.top_k <= num_candidates;
  const int limit = is_limited ? job.top_k : num_candidates;
  const bool is_certain = is_limited || s.is_whole || num_candidates < n;
  if (!is_certain && (job.top_k > 0 || job.share == kWholeShare)) return -1;
  uint64_t sum, total;
  const uint64_t before_and_own =
      block_inclusive_scan<kWarps>(i < limit ? mass(x) : 0, s.select.scratch, &sum);
  int count;
  total = is_certain ? sum : row_mass(job, 0, s.select.scratch, &count);
  const uint64_t needed = share_of(total, job.share);
  if (sum < needed) return -1;
  return 1 + __syncthreads_count(i < limit && before_and_own < needed);
}

// The same on the whole row: returns the order number of the last candidate that stays.
__device__ uint64_t cut_row(const Job& job, ChooseShared& s) {
  int count;
  uint64_t total = row_mass(job, 0, s.select.scratch, &count);
  uint64_t threshold = 0;
  if (job.top_k > 0 && job.top_k < count) {
    threshold = select_order<kWarps>(
        job.row,
        [&](uint64_t, float logit) -> uint64_t { return job.x(logit) >= job.lowest_x ? 1 : 0; },
        job.top_k, s.select);
    total = row_mass(job, threshold, s.select.scratch, &count);
  }
  if (job.share == kWholeShare) return threshold;
  const uint64_t last = select_order<kWarps>(
      job.row,
      [&](uint64_t order, float logit) -> uint64_t {
        const float x = job.x(logit);
        return x >= job.lowest_x && order >= threshold ? mass(x) : 0;
      },
      share_of(total, job.share), s.select);
  return Max<uint64_t>()(last, threshold);
}

// Draws among the first n entries of s.list.
__device__ uint64_t draw_list(const Job& job, int n, ChooseShared& s) {
  uint64_t best = 0;
  if (static_cast<int>(threadIdx.x) < n) {
    const uint64_t order = s.list[threadIdx.x];
    const int id = id_of(order);
    const Words words = philox(job.seed, job.position, id / 4);
    uint32_t word = words.v[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) word = id % 4 == i ? words.v[i] : word;
    best = score_of(job.x(logit_of(order)), gumbel(word), id);
  }
  return block_reduce<kWarps>(best, Max<uint64_t>(), s.select.scratch);
}

// Draws among the row's candidates from `threshold` up, in groups [begin, end); counts them.
__device__ uint64_t draw_row(const Job& job, uint64_t threshold, int begin, int end,
                             ChooseShared& s, int* count) {
  uint64_t best = 0;
  float best_score = kGumbelLowest;  // the score of x = 0, which some thread meets, is higher
  int n = 0;
  for (int group = begin + threadIdx.x; group < end; group += kThreads) {
    const Vec<float, 4> logits = job.row.group(group);
    float x[4];
    bool is_kept[4], any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = job.x(logits.v[i]);
      is_kept[i] = x[i] >= job.lowest_x && order_of(logits.v[i], 4 * group + i) >= threshold;
      n += is_kept[i];
      any |= is_kept[i];
    }
    if (!any) continue;
    const Words words = philox(job.seed, job.position, group);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Two logarithms only for what can still win: one in thousands.
      if (!is_kept[i] || x[i] + gumbel_bound(words.v[i]) < best_score) continue;
      const uint64_t score = score_of(x[i], gumbel(words.v[i]), 4 * group + i);
      best = Max<uint64_t>()(best, score);
      best_score = fmaxf(best_score, logit_of(best));
    }
  }
  *count = block_reduce<kWarps>(n, Sum<int>(), s.select.scratch);
  return block_reduce<kWarps>(best, Max<uint64_t>(), s.select.scratch);
}
