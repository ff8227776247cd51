// Cuts and draws by walking the row, for rows with more candidates than a list holds.
//
// The first walk adds the candidates' masses to bins of x, which yield the total and the bin that
// contains the cut. The next walk lists this bin for sorting; if it holds too many candidates
// (ties), a digit-by-digit search finds the cut instead. The last walk draws. If top_p and min_p
// are the only filters, several blocks walk together (shared_walk.cuh).
#pragma once

#include "sample/candidates.cuh"

// Count and mass of the bins that precede this thread's kBinsPerThread neighbouring bins.
struct RowBins {
  int count_before;
  uint64_t mass_before;
};
constexpr int kBinsPerThread = kBins / kThreads;

// Returns the bins of x for a row. `low` is a logit that every segment reaches, except segments of
// -inf: a useful cut lies within a few times its distance from the top.
__device__ __forceinline__ LinearBins<kBins> bins_of(const Job& job, float low) {
  constexpr float kReach = 3.0f;
  return LinearBins<kBins>(fmaxf(kReach * job.x(low), job.lowest_x), 0.0f);
}

__device__ __forceinline__ void clear_bins(ChooseShared& s) {
  Histogram& bins = s.select.bins;
#pragma unroll 1
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    bins.count[i] = bins.low[i] = bins.high[i] = 0;
  }
  __syncthreads();
}

// Adds the candidates of groups [begin, end) to s.select.bins.
__device__ __forceinline__ void add_to_bins(const Job& job, const LinearBins<kBins>& linear,
                                            int begin, int end, ChooseShared& s) {
  for_each_group(
      job.row, begin, end,
      [&](const Vec<float, 4>& logits, int) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = job.x(logits.v[i]);  // -inf past the row's end
          if (x >= job.lowest_x) s.select.bins.add(linear.bin(x), mass(x));
        }
      },
      [] {});
}

// Computes prefix sums of the filled bins, the number of candidates and their total mass.
__device__ __forceinline__ RowBins sum_bins(ChooseShared& s, int* count, uint64_t* mass_of_all) {
  Histogram& bins = s.select.bins;
  RowBins result;
  const int first = static_cast<int>(threadIdx.x) * kBinsPerThread;
  int own_count = 0;
  uint64_t own_mass = 0, all;
  for (int i = 0; i < kBinsPerThread; ++i) {
    own_count += bins.count[first + i];
    own_mass += bins.mass(first + i);
  }
  const int count_upto = block_inclusive_count<kWarps>(own_count, s.select.scratch);
  if (threadIdx.x == kThreads - 1) s.size = count_upto;
  result.count_before = count_upto - own_count;
  result.mass_before = block_inclusive_scan<kWarps>(own_mass, s.select.scratch, &all) - own_mass;
  *mass_of_all = all;
  *count = s.size;  // SAFETY: written before the barriers of the scan.
  __syncthreads();
  return result;
}

// Returns the bin at which the counts (or masses) of `rows` reach `target`; *before_count and
// *before_mass are the totals of the preceding bins.
template <bool kByMass>
__device__ int find_bin(const RowBins& rows, uint64_t target, ChooseShared& s, int* before_count,
                        uint64_t* before_mass) {
  const Histogram& bins = s.select.bins;
  int count = rows.count_before;
  uint64_t mass_upto = rows.mass_before;
  for (int i = 0; i < kBinsPerThread; ++i) {
    const int bin = static_cast<int>(threadIdx.x) * kBinsPerThread + i;
    const uint64_t before = kByMass ? mass_upto : count;
    const uint64_t own = kByMass ? bins.mass(bin) : bins.count[bin];
    if (before < target && target <= before + own) {  // true in exactly one thread
      s.select.bin = bin;
      s.select.before = count;
      s.select.rest = mass_upto;
    }
    count += bins.count[bin];
    mass_upto += bins.mass(bin);
  }
  __syncthreads();
  const int bin = s.select.bin;
  *before_count = s.select.before;
  *before_mass = s.select.rest;
  __syncthreads();  // SAFETY: all have read the choice before the next search overwrites it.
  return bin;
}

// Lists the candidates of `bin` from `threshold` up in s.sorted and returns their number. The bin
// must not hold more than kMaxCandidates.
__device__ __forceinline__ int list_bin(const Job& job, const LinearBins<kBins>& linear, int bin,
                                        uint64_t threshold, ChooseShared& s) {
  if (threadIdx.x == 0) s.size = 0;
  __syncthreads();
  for_each_id(job.row, [&](float logit, int id) {
    const float x = job.x(logit);
    if (!(x >= job.lowest_x) || linear.bin(x) != bin) return;
    const uint64_t order = order_of(logit, id);
    if (order >= threshold) s.list[atomicAdd(&s.size, 1)] = order;
  });
  __syncthreads();
  const int n = s.size;
  sort_list(n, s);
  return n;
}

// Returns how many of the n entries of s.sorted are kept: up to the one at which their masses, plus
// `mass_before` of the preceding bins, reach `needed`.
__device__ __forceinline__ int cut_bin(const Job& job, int n, uint64_t mass_before, uint64_t needed,
                                       ChooseShared& s) {
  Entries entries(job, n, s);
  entries.add_masses(n, s.select.scratch);
  return 1 + entries.count_below(n, needed - mass_before);
}

// Searches digit by digit for the order number of the last candidate to keep.
__device__ uint64_t search_row(const Job& job, ChooseShared& s) {
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

__device__ __forceinline__ bool is_small(int bin, const ChooseShared& s) {
  return s.select.bins.count[bin] <= static_cast<uint32_t>(kMaxCandidates);
}

// Like search_row, but by bins; falls back to search_row if a bin holds too many candidates.
__device__ __forceinline__ uint64_t cut_row(const Job& job, float low, ChooseShared& s) {
  int count, before_count;
  uint64_t total, before_mass, threshold = 0;
  const LinearBins<kBins> linear = bins_of(job, low);
  clear_bins(s);
  add_to_bins(job, linear, 0, job.row.num_groups(), s);
  __syncthreads();
  const RowBins rows = sum_bins(s, &count, &total);
  if (job.top_k > 0 && job.top_k < count) {
    const int bin = find_bin<false>(rows, job.top_k, s, &before_count, &before_mass);
    if (!is_small(bin, s)) return search_row(job, s);
    const int n = list_bin(job, linear, bin, 0, s);
    const int rest = job.top_k - before_count;
    threshold = s.sorted[rest - 1];
    Entries entries(job, n, s);
    total = before_mass + entries.add_masses(rest, s.select.scratch);
  }
  if (job.share == kWholeShare) return threshold;
  const uint64_t needed = share_of(total, job.share);
  const int bin = find_bin<true>(rows, needed, s, &before_count, &before_mass);
  if (!is_small(bin, s)) return search_row(job, s);
  const int n = list_bin(job, linear, bin, threshold, s);
  return s.sorted[cut_bin(job, n, before_mass, needed, s) - 1];
}

// Cuts and draws by walking the row; `low`: see bins_of. Returns the winner's score and the number
// of candidates.
__device__ __forceinline__ uint64_t choose_from_row(const Job& job, float low, ChooseShared& s,
                                                    int* kept) {
  const bool is_all = job.top_k == 0 && job.share == kWholeShare;
  const uint64_t threshold = is_all ? 0 : cut_row(job, low, s);
  return draw_row<true>(job, threshold, 0, job.row.num_groups(), s, kept);
}
