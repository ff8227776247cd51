// Cutting and drawing by walking the row: for candidates that are too many for a list.
//
// One walk adds the candidates' masses to bins of x; these give the total and the bin in which the
// cut lies. The next lists this bin, which is then sorted, and draws among what lies above it. Only
// where a bin holds too many (ties) the order of the row is searched digit by digit.
#pragma once

#include "common/candidates.cuh"

struct RowBins {
  LinearBins<kBins> linear;
  // What lies in the bins before those of this thread; these are kBinsPerThread neighbours.
  int count_before;
  uint64_t mass_before;
};
constexpr int kBinsPerThread = kBins / kThreads;

// Fills s.select.bins with all candidates; returns their number and their mass. `low` is a logit
// that most segments reach: a cut that is of any use lies within a few times its distance from the
// top.
__device__ RowBins bin_row(const Job& job, float low, ChooseShared& s, int* count,
                           uint64_t* mass_of_all) {
  constexpr float kReach = 3.0f;
  Histogram& bins = s.select.bins;
  RowBins result{LinearBins<kBins>(fmaxf(kReach * job.x(low), job.lowest_x), 0.0f)};
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    bins.count[i] = bins.low[i] = bins.high[i] = 0;
  }
  __syncthreads();
  for_each_id(job.row, [&](float logit, int) {
    const float x = job.x(logit);
    if (x >= job.lowest_x) bins.add(result.linear.bin(x), mass(x));
  });
  __syncthreads();
  const int first = static_cast<int>(threadIdx.x) * kBinsPerThread;
  int own_count = 0;
  uint64_t own_mass = 0, all;
  for (int i = 0; i < kBinsPerThread; ++i) {
    own_count += bins.count[first + i];
    own_mass += bins.weight(first + i);
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

// The bin with which the counts (or masses) of `rows` reach `target`; *before_count and
// *before_mass are those of the bins before it.
template <bool kByMass>
__device__ int find_bin(const RowBins& rows, uint64_t target, ChooseShared& s, int* before_count,
                        uint64_t* before_mass) {
  const Histogram& bins = s.select.bins;
  int count = rows.count_before;
  uint64_t mass_upto = rows.mass_before;
  for (int i = 0; i < kBinsPerThread; ++i) {
    const int bin = static_cast<int>(threadIdx.x) * kBinsPerThread + i;
    const uint64_t before = kByMass ? mass_upto : count;
    const uint64_t own = kByMass ? bins.weight(bin) : bins.count[bin];
    if (before < target && target <= before + own) {  // one thread, once
      s.select.bin = bin;
      s.select.before = count;
      s.select.rest = mass_upto;
    }
    count += bins.count[bin];
    mass_upto += bins.weight(bin);
  }
  __syncthreads();
  const int bin = s.select.bin;
  *before_count = s.select.before;
  *before_mass = s.select.rest;
  __syncthreads();  // SAFETY: all have read the choice before a next search overwrites it.
  return bin;
}

// Lists the candidates of `bin` from `threshold` up in s.sorted and returns their number; with
// kDraws, draws among those of the bins before. The bin must not hold more than kMaxCandidates.
template <bool kDraws>
__device__ int walk_row(const Job& job, const LinearBins<kBins>& linear, int bin,
                        uint64_t threshold, ChooseShared& s, Drawing& drawing) {
  if (threadIdx.x == 0) s.size = 0;
  __syncthreads();
  for_each_group(
      job.row, 0, job.row.num_groups(),
      [&](const Vec<float, 4>& logits, int group) {
        float x[4];
        bool any = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = job.x(logits.v[i]);
          const int own = x[i] >= job.lowest_x ? linear.bin(x[i]) : kBins;
          if (own == bin) {
            const uint64_t order = order_of(logits.v[i], 4 * group + i);
            if (order >= threshold) s.list[atomicAdd(&s.size, 1)] = order;
          }
          if (own >= bin) x[i] = minus_inf();
          any |= own < bin;
        }
        if (!kDraws || !any) return;
        const Words words = philox(job.seed, job.position, group);
#pragma unroll
        for (int i = 0; i < 4; ++i) drawing.consider(x[i], words.v[i], 4 * group + i);
      },
      [&] {
        if (kDraws) share_best(drawing, s);
      });
  __syncthreads();
  const int n = s.size;
  block_sort_descending(s.list, n, s.sorted);
  return n;
}

// The order number of the last candidate that stays, by searches for each digit of it.
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

// Cuts and draws; `low` is as for bin_row. Returns the winner's score and how many candidates there
// were.
__device__ uint64_t choose_from_row(const Job& job, float low, ChooseShared& s, int* kept) {
  const int end = job.row.num_groups();
  if (job.top_k == 0 && job.share == kWholeShare) return draw_row<false>(job, 0, 0, end, s, kept);
  int count, before_count;
  uint64_t total, before_mass, threshold = 0;
  const RowBins rows = bin_row(job, low, s, &count, &total);
  const auto is_small = [&](int bin) {
    return s.select.bins.count[bin] <= static_cast<uint32_t>(kMaxCandidates);
  };
  const auto search = [&] { return draw_row<true>(job, search_row(job, s), 0, end, s, kept); };
  if (job.top_k > 0 && job.top_k < count) {
    Drawing none{0, 0.0f};
    const int bin = find_bin<false>(rows, job.top_k, s, &before_count, &before_mass);
    if (!is_small(bin)) return search();
    walk_row<false>(job, rows.linear, bin, 0, s, none);
    const int rest = job.top_k - before_count, i = threadIdx.x;
    threshold = s.sorted[rest - 1];
    const uint64_t own = i < rest ? mass(job.x(logit_of(s.sorted[i]))) : 0;
    total = before_mass + block_reduce<kWarps>(own, Sum<uint64_t>(), s.select.scratch);
  }
  if (job.share == kWholeShare) return draw_row<true>(job, threshold, 0, end, s, kept);

  const uint64_t needed = share_of(total, job.share);
  const int bin = find_bin<true>(rows, needed, s, &before_count, &before_mass);
  if (!is_small(bin)) return search();
  Drawing drawing = begin_drawing(s);
  const int n = walk_row<true>(job, rows.linear, bin, threshold, s, drawing);
  const int i = static_cast<int>(threadIdx.x);
  uint64_t sum;
  const uint64_t before_and_own =
      before_mass + block_inclusive_scan<kWarps>(
                        i < n ? mass(job.x(logit_of(s.sorted[i]))) : 0, s.select.scratch, &sum);
  const int rest = 1 + __syncthreads_count(i < n && before_and_own < needed);
  draw_list(job, rest, s, drawing);
  *kept = before_count + rest;
  return end_drawing(drawing, s);
}
