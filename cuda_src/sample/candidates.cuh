// Applies top_k, top_p and min_p to the candidates of one row, and draws one of them.
//
// The fast path works on a list of the row's largest logits (row_list.cuh), read from the segments
// that may contain them (segments.cuh). The slow path walks the whole row (row_cut.cuh).
#pragma once

#include "sample/philox.cuh"
#include "sample/row_list.cuh"

constexpr uint32_t kWholeShare = 1u << 24;

// Parameters of one row's draw.
struct Job {
  Row row;
  float largest, scale;  // x = (logit - largest) * scale
  float lowest_x;        // lowest x of any candidate
  int top_k;             // 0: no limit
  uint32_t share;        // top_p in steps of 2^-24
  uint64_t seed, position;

  __device__ __forceinline__ float x(float logit) const {
    return __fmul_rn(__fsub_rn(logit, largest), scale);
  }
};

__device__ __forceinline__ Job make_job(Row row, float largest, float temperature, int top_k,
                                        float top_p, float min_p, uint64_t seed, int64_t position) {
  constexpr float kTiny = 1.17549435e-38f;
  Job job{row};
  job.largest = largest;
  job.scale = scale_of(temperature);
  job.lowest_x = -kMassBits;
  if (min_p > 0.0f) job.lowest_x = fmaxf(job.lowest_x, exact_log2(fmaxf(min_p, kTiny)));
  job.top_k = top_k > 0 && top_k < row.size ? top_k : 0;
  job.share = static_cast<uint32_t>(ceilf(top_p * kWholeShare));
  job.seed = seed;
  job.position = static_cast<uint64_t>(position);
  return job;
}

// Packs a score so that the larger number wins, ties going to the lowest id; see order_of.
__device__ __forceinline__ uint64_t score_of(float x, float noise, int id) {
  return order_of(__fadd_rn(x, noise), id);
}

// Returns the total mass of the row's candidates from `threshold` up; *count is their number.
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

// Bound on the relative error of the tiles' sum of 2^x over a row, compared with the sum of masses,
// with a factor of 2 to spare: x is off by at most 40 * 2^-23 where it matters (4e-6), ex2.approx
// by 2^-22, the sums by 3e-6, and the masses lose up to 2^21 steps of 2^-40 (2e-6).
constexpr float kTotalError = 2e-5f;

// Returns the sum of 2^x over the row, within kTotalError.
__device__ float approximate_total(const Job& job, const Tile* tiles, int num_tiles,
                                   uint64_t* scratch) {
  float sum = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
    if (tiles[i].largest > minus_inf()) {
      sum += tiles[i].sum * approximate_exp2(job.x(tiles[i].largest));
    }
  }
  return block_reduce<kWarps>(sum, Sum<float>(), scratch);
}

// This thread's kEntries consecutive entries of s.sorted[0..n); -inf past the end.
struct Entries {
  float x[kEntries];
  uint64_t mass_upto[kEntries];  // total mass of the entries up to and including this one

  __device__ __forceinline__ Entries(const Job& job, int n, const ChooseShared& s) {
#pragma unroll
    for (int k = 0; k < kEntries; ++k) {
      const bool is_there = index(k) < n;
      x[k] = is_there ? job.x(logit_of(s.sorted[index(k)])) : minus_inf();
    }
  }
  static __device__ __forceinline__ int index(int k) {
    return kEntries * static_cast<int>(threadIdx.x) + k;
  }
  // Fills mass_upto over the first `limit` entries; returns their total mass.
  __device__ __forceinline__ uint64_t add_masses(int limit, uint64_t* scratch) {
    uint64_t own = 0, sum;
#pragma unroll
    for (int k = 0; k < kEntries; ++k) {
      own += index(k) < limit ? mass(x[k]) : 0;
      mass_upto[k] = own;
    }
    const uint64_t before = block_inclusive_scan<kWarps>(own, scratch, &sum) - own;
#pragma unroll
    for (int k = 0; k < kEntries; ++k) mass_upto[k] += before;
    return sum;
  }
  // Returns how many of the block's entries satisfy the predicate.
  template <typename Predicate>
  __device__ __forceinline__ int count(Predicate is_so) const {
    int sum = 0;
#pragma unroll
    for (int k = 0; k < kEntries; ++k) sum += __syncthreads_count(is_so(k));
    return sum;
  }
  // Returns how many of the first `limit` entries have mass_upto < target.
  __device__ __forceinline__ int count_below(int limit, uint64_t target) const {
    return count([&](int k) { return index(k) < limit && mass_upto[k] < target; });
  }
};

constexpr int kUncertain = -1;    // the cut may lie past the list
constexpr int kFarPastList = -2;  // the cut lies past even a longer list

// Cuts the n entries of s.sorted; returns the number kept, or one of the two codes above.
__device__ int cut_list(const Job& job, int n, bool is_whole, const Tile* tiles, int num_tiles,
                        ChooseShared& s) {
  Entries entries(job, n, s);
  const int num_candidates = entries.count([&](int k) { return entries.x[k] >= job.lowest_x; });
  const bool is_limited = job.top_k > 0 && job.top_k <= num_candidates;
  const int limit = is_limited ? job.top_k : num_candidates;
  const bool is_certain = is_limited || is_whole || num_candidates < n;
  if (is_certain && job.share == kWholeShare) return limit;
  if (!is_certain && (job.top_k > 0 || job.share == kWholeShare)) return kUncertain;
  const uint64_t sum = entries.add_masses(limit, s.select.scratch);
  uint64_t total = sum;
  if (!is_certain && job.lowest_x == -kMassBits) {  // bounds on the total may suffice
    const float about = approximate_total(job, tiles, num_tiles, s.select.scratch) * 0x1p40f;
    const uint64_t least = share_of(__float2ull_rd(about * (1.0f - kTotalError)), job.share);
    const uint64_t most = share_of(__float2ull_ru(about * (1.0f + kTotalError)), job.share);
    if (sum < least) return sum < least / 2 ? kFarPastList : kUncertain;
    const int kept = entries.count_below(limit, least);
    if (kept == entries.count_below(limit, most) && sum >= most) return 1 + kept;
  }
  int count;
  if (!is_certain) total = row_mass(job, 0, s.select.scratch, &count);
  const uint64_t needed = share_of(total, job.share);
  if (sum < needed) return kUncertain;
  return 1 + entries.count_below(limit, needed);
}

// Long and rarely called, so not inlined into the loops that call it.
__device__ __noinline__ uint64_t exact_score(float x, uint32_t word, int id) {
  return score_of(x, gumbel(word), id);
}

// One thread's state during a draw.
struct Drawing {
  uint64_t best;
  float best_score;  // best score known to the block: lower scores cannot win

  __device__ __forceinline__ bool can_win(float x, uint32_t word) const {
    return x + gumbel_bound(word) >= best_score;
  }
  // The exact score takes two logarithms, so it is computed only for candidates that can still win,
  // one in thousands.
  __device__ __forceinline__ void consider(float x, uint32_t word, int id) {
    if (!can_win(x, word)) return;
    best = Max<uint64_t>()(best, exact_score(x, word, id));
    best_score = fmaxf(best_score, logit_of(best));
  }
};

// Begins a draw. All threads of the block must call it.
__device__ __forceinline__ Drawing begin_drawing(ChooseShared& s) {
  // Lower than the score of the largest logit (x = 0), which some thread always draws.
  if (threadIdx.x == 0) s.best_key = ordered_key(kGumbelLowest);
  __syncthreads();
  return Drawing{0, kGumbelLowest};
}

// Shares the best score with the other threads. This only saves work, so reading it late does no
// harm.
__device__ __forceinline__ void share_best(Drawing& drawing, ChooseShared& s) {
  volatile uint32_t* shared = &s.best_key;
  const uint32_t best = __reduce_max_sync(kFullMask, ordered_key(drawing.best_score));
  const uint32_t known = *shared;
  if (best > known && threadIdx.x % kWarpSize == 0) atomicMax(&s.best_key, best);
  drawing.best_score = from_ordered_key(max(best, known));
}

// Returns the best of all threads' draws to every thread.
__device__ __forceinline__ uint64_t end_drawing(const Drawing& drawing, ChooseShared& s) {
  return block_reduce<kWarps>(drawing.best, Max<uint64_t>(), s.select.scratch);
}

__device__ __forceinline__ uint32_t word_of(const Job& job, int id) {
  const Words words = philox(job.seed, job.position, id / 4);
  uint32_t word = words.v[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) word = id % 4 == i ? words.v[i] : word;
  return word;
}

// This thread's part of a draw among the first n entries of s.sorted.
__device__ __forceinline__ void draw_list(const Job& job, int n, const ChooseShared& s,
                                          Drawing& drawing) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const uint64_t order = s.sorted[i];
    const int id = id_of(order);
    drawing.consider(job.x(logit_of(order)), word_of(job, id), id);
  }
}

// This thread's part of a draw among kGroups groups, kThreads apart. First computes all random
// words, which are independent, then the few scores that can win. Adds the number of candidates to
// n.
template <bool kHasThreshold, int kGroups>
__device__ __forceinline__ void draw_batch(const Job& job, uint64_t threshold, int first, int end,
                                           Drawing& drawing, int& n) {
  const auto group = [&](int j) { return first + j * kThreads; };
  Vec<float, 4> x[kGroups];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    x[j] = Vec<float, 4>{minus_inf(), minus_inf(), minus_inf(), minus_inf()};
    if (group(j) < end) x[j] = job.row.group(group(j));
  }
  float top = minus_inf();
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) {
    float& value = x[i / 4].v[i % 4];
    const float logit = value;
    value = job.x(logit);
    bool is_kept = value >= job.lowest_x;
    if (kHasThreshold) is_kept &= order_of(logit, 4 * group(i / 4) + i % 4) >= threshold;
    if (!is_kept) value = minus_inf();
    n += is_kept;
    top = fmaxf(top, value);
  }
  if (!__any_sync(kFullMask, top + kGumbelHighest >= drawing.best_score)) return;
  Words words[kGroups];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) words[j] = philox(job.seed, job.position, group(j));
  bool any = false;
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i)
    any |= drawing.can_win(x[i / 4].v[i % 4], words[i / 4].v[i % 4]);
  if (!any) return;
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i)
    drawing.consider(x[i / 4].v[i % 4], words[i / 4].v[i % 4], 4 * group(i / 4) + i % 4);
}

// Draws among the row's candidates from `threshold` up in groups [begin, end), and counts them.
template <bool kHasThreshold>
__device__ uint64_t draw_row(const Job& job, uint64_t threshold, int begin, int end,
                             ChooseShared& s, int* count) {
  Drawing drawing = begin_drawing(s);
  int n = 0, base = begin;
#pragma unroll 1
  for (; end - base > (kLoads - 1) * kThreads; base += kLoads * kThreads) {
    draw_batch<kHasThreshold, kLoads>(job, threshold, base + threadIdx.x, end, drawing, n);
    share_best(drawing, s);
  }
#pragma unroll 1
  for (; base < end; base += kThreads) {
    draw_batch<kHasThreshold, 1>(job, threshold, base + threadIdx.x, end, drawing, n);
    share_best(drawing, s);
  }
  *count = block_reduce<kWarps>(n, Sum<int>(), s.select.scratch);
  return end_drawing(drawing, s);
}
