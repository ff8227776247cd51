// A sorted list of a row's largest logits, in shared memory.
#pragma once

#include "sample/block.cuh"
#include "sample/exact_math.cuh"
#include "sample/row_select.cuh"
#include "sample/segments.cuh"
#include "common/types.cuh"

constexpr int kThreads = 512;  // one block per row
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kKeysPerThread = kMaxSegments / kThreads;  // segment keys per thread
constexpr int kEntries = 2;                              // consecutive list entries per thread
constexpr int kMaxCandidates = kEntries * kThreads;
constexpr int kListed = 128;  // minimum number of listed logits without top_k

struct ChooseShared {
  SelectShared select;
  uint64_t list[kMaxCandidates], sorted[kMaxCandidates];
  uint32_t segments[kMaxCandidates];  // reused for bins while the list is sorted
  int size, num_segments;
  uint32_t best_key;         // best score seen by any thread
  uint32_t broadcast_value;  // value broadcast by thread 0
  bool is_last;
};

// Bins of values, numbered from `high` down. The last bin also holds all values below `low`, or
// every value if `low` equals `high`.
template <int kNumBins>
struct LinearBins {
  float high, steps;

  __device__ __forceinline__ LinearBins(float low, float high)
      : high(high), steps((kNumBins - 1) / (high - low)) {}
  __device__ __forceinline__ int bin(float value) const {
    // If 0 * inf is NaN, fminf returns the other operand.
    return round_down(fminf((high - value) * steps, kNumBins - 1));
  }
};

// Sorts s.list[0..n), whose entries are distinct, into s.sorted in descending order. An entry's
// rank is the number of larger entries; many entries are binned first, and compared only within
// their bin.
__device__ __forceinline__ void sort_list(int n, ChooseShared& s) {
  if (n <= kThreads / 2) {
    block_sort_descending(s.list, n, s.sorted);
    return;
  }
  uint64_t own[kEntries];
  uint32_t top = 0, inverse = 0;  // largest key, inverse of the lowest key
#pragma unroll
  for (int k = 0; k < kEntries; ++k) {
    const int i = k * kThreads + static_cast<int>(threadIdx.x);
    s.segments[i] = 0;
    if (i >= n) continue;
    own[k] = s.list[i];
    top = max(top, key_of(own[k]));
    inverse = max(inverse, ~key_of(own[k]));
  }
  top = block_max<kWarps>(top, s.select.scratch);
  inverse = block_max<kWarps>(inverse, s.select.scratch);
  const LinearBins<kMaxCandidates> linear(from_ordered_key(~inverse), from_ordered_key(top));
  int bin[kEntries], place[kEntries];
#pragma unroll
  for (int k = 0; k < kEntries; ++k) {
    if (k * kThreads + static_cast<int>(threadIdx.x) >= n) continue;
    bin[k] = linear.bin(logit_of(own[k]));
    place[k] = static_cast<int>(atomicAdd(&s.segments[bin[k]], 1u));
  }
  __syncthreads();
  // A bin's word: its count and, in the upper half, the count before it.
  const int first = kEntries * static_cast<int>(threadIdx.x);
  int count[kEntries], sum = 0;
#pragma unroll
  for (int k = 0; k < kEntries; ++k) sum += count[k] = static_cast<int>(s.segments[first + k]);
  int before = block_inclusive_count<kWarps>(sum, s.select.scratch) - sum;
#pragma unroll
  for (int k = 0; k < kEntries; ++k) {
    s.segments[first + k] = static_cast<uint32_t>(before << 16 | count[k]);
    before += count[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kEntries; ++k) {
    if (k * kThreads + static_cast<int>(threadIdx.x) >= n) continue;
    s.list[(s.segments[bin[k]] >> 16) + place[k]] = own[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kEntries; ++k) {
    if (k * kThreads + static_cast<int>(threadIdx.x) >= n) continue;
    const int begin = static_cast<int>(s.segments[bin[k]] >> 16);
    const int end = begin + static_cast<int>(s.segments[bin[k]] & 0xffffu);
    int rank = begin;
#pragma unroll 1
    for (int j = begin; j < end; ++j) rank += s.list[j] > own[k];
    s.sorted[rank] = own[k];
  }
  __syncthreads();
}

// Returns the bitwise inverse of the thread's lowest key above the key of -inf; 0 if it has none.
__device__ __forceinline__ uint32_t inverse_of_lowest(const uint32_t (&keys)[kKeysPerThread]) {
  uint32_t inverse = 0;
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i)
    inverse = max(inverse, keys[i] > kMinusInfKey ? ~keys[i] : 0);
  return inverse;
}

// Bins the keys, and lists in s.segments the segments of the first bins that together hold at least
// `wanted` keys, or all. Returns the last such bin; *count is the number of segments, which are not
// listed if s.segments cannot hold them.
__device__ __forceinline__ int select_segments(const LinearBins<kThreads>& linear,
                                               const uint32_t (&keys)[kKeysPerThread], int wanted,
                                               ChooseShared& s, int* count) {
  int* bins = reinterpret_cast<int*>(s.select.bins.count);
  int bin[kKeysPerThread];
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) {
    bin[i] = keys[i] > kMinusInfKey ? linear.bin(from_ordered_key(keys[i])) : kThreads;
    if (bin[i] < kThreads) atomicAdd(&bins[bin[i]], 1);
  }
  __syncthreads();
  const int own = bins[threadIdx.x];
  const int sum = block_inclusive_count<kWarps>(own, s.select.scratch);
  const bool is_end = threadIdx.x == kThreads - 1 && sum < wanted;
  if (is_end || (sum >= wanted && sum - own < wanted)) {  // true in exactly one thread
    s.select.bin = threadIdx.x;
    s.select.before = sum;
  }
  __syncthreads();
  const int last_bin = s.select.bin;
  *count = s.select.before;
  if (*count > kMaxCandidates) return last_bin;
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) {
    if (bin[i] <= last_bin) {
      s.segments[atomicAdd(&s.num_segments, 1)] = static_cast<uint32_t>(i * kThreads + threadIdx.x);
    }
  }
  __syncthreads();
  return last_bin;
}

// Appends to s.list the logits of the segments in s.segments that lie in bins up to last_bin;
// s.size counts all of them, even those that do not fit into the list.
__device__ __forceinline__ void read_segments(const Row& row, const LinearBins<kThreads>& linear,
                                              int last_bin, int count, int shift, ChooseShared& s) {
  const int num_parts = count << shift;  // parts of kSegment logits, one warp each
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int first = warp_idx; first < num_parts; first += kLoads * kWarps) {
    Vec<float, 4> x[kLoads];
    int group[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int part = min(first + j * kWarps, num_parts - 1);
      const int in_segment = part & ((1 << shift) - 1);
      const int segment = static_cast<int>(s.segments[part >> shift]) << shift | in_segment;
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
        const int at = atomicAdd(&s.size, 1);
        if (at < kMaxCandidates) s.list[at] = order_of(logit, 4 * group[j] + i);
      }
    }
  }
  __syncthreads();
}

// Puts the row's largest logits into s.sorted in descending order: at least min(wanted, all) of
// them, and no -inf. Returns their number, or -1 if a list cannot hold them. `keys`: the keys of
// segments threadIdx.x + i * kThreads. `top`: the largest of all keys. *is_whole: whether the list
// holds the whole row.
__device__ int list_largest(const Row& row, const uint32_t (&keys)[kKeysPerThread], uint32_t top,
                            int wanted, int shift, ChooseShared& s, bool* is_whole) {
  reinterpret_cast<int*>(s.select.bins.count)[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.size = s.num_segments = 0;
  // SAFETY: block_max has barriers, so nothing is added to the bins too early.
  const float low = from_ordered_key(~block_max<kWarps>(inverse_of_lowest(keys), s.select.scratch));
  const LinearBins<kThreads> linear(low, from_ordered_key(top));
  int count;
  const int last_bin = select_segments(linear, keys, wanted, s, &count);
  if (count > kMaxCandidates) return -1;
  read_segments(row, linear, last_bin, count, shift, s);
  const int n = s.size;
  *is_whole = last_bin == kThreads - 1;
  if (n > kMaxCandidates) return -1;
  sort_list(n, s);
  return n;
}

// The number of logits to request from list_largest such that the list rarely overflows: n random
// logits lie in about N (1 - e^(-n / N)) of N segments.
__device__ __forceinline__ int most_listed(int num_segments) {
  constexpr float kFill = 0.9f * kMaxCandidates * kLog2E;
  return static_cast<int>(num_segments * (1.0f - approximate_exp2(-kFill / num_segments)));
}
