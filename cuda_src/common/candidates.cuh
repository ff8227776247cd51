// Second stage of sampling: cut the candidates of one row, and draw one of them.
//
// The fast way works on a list of the row's largest logits, sorted in shared memory, which it reads
// from the segments (common/segments.cuh) that may hold them. The other way walks the row itself
// (common/row_cut.cuh).
#pragma once

#include "common/block.cuh"
#include "common/exact_math.cuh"
#include "common/philox.cuh"
#include "common/row_select.cuh"
#include "common/segments.cuh"
#include "common/types.cuh"

constexpr int kThreads = 512;  // one block a row
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kKeys = kMaxSegments / kThreads;  // keys of segments a thread holds
constexpr int kMaxCandidates = kThreads;        // of a list
constexpr int kListed = 128;                    // listed at least, where no filter says how many
constexpr uint32_t kWholeShare = 1u << 24;

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

__device__ __forceinline__ Job make_job(Row row, float largest, float temperature, int top_k,
                                        float top_p, float min_p, uint64_t seed,
                                        int64_t position) {
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

struct ChooseShared {
  SelectShared select;
  uint64_t list[kMaxCandidates], sorted[kMaxCandidates];
  int segments[kMaxCandidates];
  int size, num_segments;
  uint32_t best_key;  // of the scores seen by any thread
  bool is_last;
};

// Scores are numbers as order_of gives them: the largest wins, of equal ones the lowest id.
__device__ __forceinline__ uint64_t score_of(float x, float noise, int id) {
  return order_of(__fadd_rn(x, noise), id);
}

// Bins of values up to `high`, counted from there; never decreasing as the value falls. Values
// below `low` are in the last bin, and all are if the two are equal.
template <int kNumBins>
struct LinearBins {
  float high, steps;

  __device__ __forceinline__ LinearBins(float low, float high)
      : high(high), steps((kNumBins - 1) / (high - low)) {}
  __device__ __forceinline__ int bin(float value) const {
    // fminf drops the NaN of 0 * inf.
    return static_cast<int>(fminf((high - value) * steps, kNumBins - 1));
  }
};

// The inverse of the thread's lowest key above that of -inf; 0 if there is none.
__device__ __forceinline__ uint32_t inverse_of_lowest(const uint32_t (&keys)[kKeys]) {
  uint32_t inverse = 0;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) inverse = max(inverse, keys[i] > kMinusInfKey ? ~keys[i] : 0);
  return inverse;
}

// Lists a beginning of the row's order in s.sorted, at least min(wanted, all) logits, but not those
// of -inf; returns how many, or -1 if they are too many. `keys` are those of segments threadIdx.x +
// i * kThreads, `top` is the largest of all. *is_whole tells whether the list holds all.
__device__ int list_largest(const Row& row, const uint32_t (&keys)[kKeys], uint32_t top, int wanted,
                            int shift, ChooseShared& s, bool* is_whole) {
  int* bins = reinterpret_cast<int*>(s.select.bins.count);
  bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.size = s.num_segments = 0;
  const float low = from_ordered_key(~block_max<kWarps>(inverse_of_lowest(keys), s.select.scratch));
  const LinearBins<kThreads> linear(low, from_ordered_key(top));

  int bin[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    bin[i] = keys[i] > kMinusInfKey ? linear.bin(from_ordered_key(keys[i])) : kThreads;
    if (bin[i] < kThreads) atomicAdd(&bins[bin[i]], 1);
  }
  __syncthreads();
  const int own = bins[threadIdx.x];
  const int sum = block_inclusive_count<kWarps>(own, s.select.scratch);
  const bool is_end = threadIdx.x == kThreads - 1 && sum < wanted;
  if (is_end || (sum >= wanted && sum - own < wanted)) {  // one thread
    s.select.bin = threadIdx.x;
    s.select.before = sum;
  }
  __syncthreads();
  const int last_bin = s.select.bin, count = s.select.before;
  if (count > kMaxCandidates) return -1;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (bin[i] <= last_bin) {
      s.segments[atomicAdd(&s.num_segments, 1)] = i * kThreads + static_cast<int>(threadIdx.x);
    }
  }
  __syncthreads();

  const int num_parts = count << shift;  // of kSegment logits, one warp each
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  for (int first = warp_idx; first < num_parts; first += kLoads * kWarps) {
    Vec<float, 4> x[kLoads];
    int group[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int part = min(first + j * kWarps, num_parts - 1);
      const int segment = s.segments[part >> shift] << shift | (part & ((1 << shift) - 1));
      group[j] = segment * kWarpSize + lane_idx;
      x[j] = row.group(group[j]);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (first + j * kWarps >= num_parts) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float logit = x[j].v[i];
        if (!(logit > minus_inf()) || linear.bin(logit) > last_bin) continue;
        const int place = atomicAdd(&s.size, 1);
        if (place < kMaxCandidates) s.list[place] = order_of(logit, 4 * group[j] + i);
      }
    }
  }
  __syncthreads();
  const int n = s.size;
  *is_whole = last_bin == kThreads - 1;
  if (n > kMaxCandidates) return -1;
  block_sort_descending(s.list, n, s.sorted);
  return n;
}

// How many to ask list_largest for so that what it lists seldom is too much: n logits at random lie
// in about N (1 - e^(-n / N)) of N segments.
__device__ __forceinline__ int most_listed(int num_segments) {
  constexpr float kFill = 0.9f * kMaxCandidates * kLog2E;
  return static_cast<int>(num_segments * (1.0f - approximate_exp2(-kFill / num_segments)));
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

// The relative error of a row's sum of 2^x from the tiles, as against the sum of masses: x has
// errors of 40 * 2^-23 at most where it matters (4e-6), ex2.approx 2^-22, the sums 3e-6, and the
// masses leave out up to 2^21 steps of 2^-40 (2e-6), twice.
constexpr float kTotalError = 2e-5f;

// About the sum of 2^x over the row.
__device__ float approximate_total(const Job& job, const Tile* tiles, int num_tiles,
                                   uint64_t* scratch) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
    if (tiles[i].largest > minus_inf()) {
      sum += tiles[i].sum * approximate_exp2(job.x(tiles[i].largest));
    }
  }
  return block_reduce<kWarps>(sum, Sum<float>(), scratch);
}

// Cuts the n entries of s.sorted; returns how many stay, or -1 if the cut may lie behind the list.
__device__ int cut_list(const Job& job, int n, bool is_whole, const Tile* tiles, int num_tiles,
                        ChooseShared& s) {
  const int i = static_cast<int>(threadIdx.x);
  const float x = i < n ? job.x(logit_of(s.sorted[i])) : minus_inf();
  const int num_candidates = __syncthreads_count(x >= job.lowest_x);
  const bool is_limited = job.top_k > 0 && job.top_k <= num_candidates;
  const int limit = is_limited ? job.top_k : num_candidates;
  const bool is_certain = is_limited || is_whole || num_candidates < n;
  if (is_certain && job.share == kWholeShare) return limit;
  if (!is_certain && (job.top_k > 0 || job.share == kWholeShare)) return -1;
  uint64_t sum;
  const uint64_t before_and_own =
      block_inclusive_scan<kWarps>(i < limit ? mass(x) : 0, s.select.scratch, &sum);
  uint64_t total = sum;
  if (!is_certain && job.lowest_x == -kMassBits) {  // bounds of the total may do
    const float about = approximate_total(job, tiles, num_tiles, s.select.scratch) * 0x1p40f;
    const uint64_t least = share_of(__float2ull_rd(about * (1.0f - kTotalError)), job.share);
    const uint64_t most = share_of(__float2ull_ru(about * (1.0f + kTotalError)), job.share);
    if (sum < least) return -1;
    const int kept = __syncthreads_count(i < limit && before_and_own < least);
    if (kept == __syncthreads_count(i < limit && before_and_own < most) && sum >= most) {
      return 1 + kept;
    }
  }
  int count;
  if (!is_certain) total = row_mass(job, 0, s.select.scratch, &count);
  const uint64_t needed = share_of(total, job.share);
  if (sum < needed) return -1;
  return 1 + __syncthreads_count(i < limit && before_and_own < needed);
}

// Seldom called and long: kept out of the loops that call it.
__device__ __noinline__ uint64_t exact_score(float x, uint32_t word, int id) {
  return score_of(x, gumbel(word), id);
}

// What a thread has drawn so far.
struct Drawing {
  uint64_t best;
  float best_score;  // of this thread, or of another of the block: what is below cannot win

  // Two logarithms only for what can still win: one in thousands.
  __device__ __forceinline__ void consider(float x, uint32_t word, int id) {
    if (x + gumbel_bound(word) < best_score) return;
    best = Max<uint64_t>()(best, exact_score(x, word, id));
    best_score = fmaxf(best_score, logit_of(best));
  }
};

// Begins a drawing of the whole block.
__device__ __forceinline__ Drawing begin_drawing(ChooseShared& s) {
  // The score of x = 0, which some thread meets, is higher.
  if (threadIdx.x == 0) s.best_key = ordered_key(kGumbelLowest);
  __syncthreads();
  return Drawing{0, kGumbelLowest};
}

// Tells the other threads of the best score; only saves work, so it does not matter who sees it
// when.
__device__ __forceinline__ void share_best(Drawing& drawing, ChooseShared& s) {
  volatile uint32_t* shared = &s.best_key;
  const uint32_t best = __reduce_max_sync(kFullMask, ordered_key(drawing.best_score));
  const uint32_t known = *shared;
  if (best > known && threadIdx.x % kWarpSize == 0) atomicMax(&s.best_key, best);
  drawing.best_score = from_ordered_key(max(best, known));
}

// The best of all drawings, for every thread.
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
  if (static_cast<int>(threadIdx.x) >= n) return;
  const uint64_t order = s.sorted[threadIdx.x];
  const int id = id_of(order);
  drawing.consider(job.x(logit_of(order)), word_of(job, id), id);
}

// Draws among the row's candidates from `threshold` up, in groups [begin, end); counts them.
template <bool kHasThreshold>
__device__ uint64_t draw_row(const Job& job, uint64_t threshold, int begin, int end,
                             ChooseShared& s, int* count) {
  Drawing drawing = begin_drawing(s);
  int n = 0;
  for_each_group(
      job.row, begin, end,
      [&](const Vec<float, 4>& logits, int group) {
        float x[4];
        bool any = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = job.x(logits.v[i]);
          bool is_kept = x[i] >= job.lowest_x;
          if (kHasThreshold) is_kept &= order_of(logits.v[i], 4 * group + i) >= threshold;
          if (!is_kept) x[i] = minus_inf();
          n += is_kept;
          any |= is_kept;
        }
        if (!any) return;
        const Words words = philox(job.seed, job.position, group);
#pragma unroll
        for (int i = 0; i < 4; ++i) drawing.consider(x[i], words.v[i], 4 * group + i);
      },
      [&] { share_best(drawing, s); });
  *count = block_reduce<kWarps>(n, Sum<int>(), s.select.scratch);
  return end_drawing(drawing, s);
}
