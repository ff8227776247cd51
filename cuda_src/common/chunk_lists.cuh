// First stage of sampling: what a block learns of a chunk of a row while it holds it in registers.
//
// Besides its largest logit, a chunk lists all of its logits from some bound up: at least 64 of
// them (or all it has), and seldom many more. All logits of the row from the highest bound of its
// chunks up are then in the lists, so a row's first 64 at least are known exactly.
#pragma once

#include "common/block.cuh"
#include "common/row_select.cuh"
#include "common/types.cuh"

constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / kWarpSize;
constexpr int kScanGroups = 4;  // groups of four logits a thread
constexpr int kScanValues = 4 * kScanGroups;
constexpr int kMinListed = 64;     // a chunk lists at least so many (or all it has)
constexpr int kMaxListed = 256;    // room for the list of a chunk
constexpr uint32_t kNoList = ~0u;  // a bound above every logit: the list is not there

struct Chunk {
  uint64_t best;            // order number of its largest logit; 0 if all are -inf
  float lse_max, lse_sum;   // of the raw logits: sum of exp(logit - lse_max)
  uint32_t bound;           // every logit whose key is at least this is listed
  int num_listed;
  int is_bad;               // a NaN or +inf was seen
  int padding;
};

__device__ __forceinline__ bool is_bad(float x) { return !(x < -minus_inf()); }

struct ScanShared {
  uint64_t scratch[kScanWarps];
  int bins[kScanThreads];
  int size;
};

// Bin of a value in [low, high], counted from high; all in the last one if these are equal.
template <int kBins>
__device__ __forceinline__ int linear_bin(float value, float low, float high) {
  const float position = (high - value) / (high - low) * (kBins - 1);
  return static_cast<int>(fminf(position, kBins - 1));  // fminf drops the NaN of 0 / 0
}

// The first bin with which the counts reach `target`; one bin per thread of the block.
template <int kWarps>
__device__ __forceinline__ int bin_reaching(const int* bins, int target, uint64_t* scratch,
                                            int* result) {
  const int own = bins[threadIdx.x];
  uint64_t total;
  const int sum = static_cast<int>(block_inclusive_scan<kWarps>(own, scratch, &total));
  if (sum >= target && sum - own < target) *result = threadIdx.x;  // one thread
  __syncthreads();
  const int bin = *result;
  __syncthreads();  // SAFETY: all have read it before it is used again.
  return bin;
}

// A value that at least kMinListed of the chunk's logits reach, and not many more: among the
// largest logits of each thread, by a histogram. -inf if there are too few to choose from.
__device__ float scan_bound(float mine, ScanShared& s) {
  const bool is_valid = mine > minus_inf();
  if (__syncthreads_count(is_valid) < kMinListed) return minus_inf();
  const float high = block_reduce<kScanWarps>(mine, Max<float>(), s.scratch);
  const float low = block_reduce<kScanWarps>(is_valid ? mine : high, Min<float>(), s.scratch);
  const int bin = is_valid ? linear_bin<kScanThreads>(mine, low, high) : kScanThreads;
  s.bins[threadIdx.x] = 0;
  __syncthreads();
  if (is_valid) atomicAdd(&s.bins[bin], 1);
  __syncthreads();
  const int last_bin = bin_reaching<kScanWarps>(s.bins, kMinListed, s.scratch, &s.size);
  return block_reduce<kScanWarps>(bin <= last_bin ? mine : high, Min<float>(), s.scratch);
}

// Lists the chunk's logits from `bound` up, in any order; gives up when they are too many.
__device__ void scan_list(const float (&x)[kScanValues], int first_group, float bound,
                          ScanShared& s, Chunk* chunk, uint64_t* listed) {
  if (threadIdx.x == 0) s.size = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kScanValues; ++i) {
    if (x[i] >= bound && x[i] > minus_inf()) {
      const int place = atomicAdd(&s.size, 1);
      const int group = first_group + (i / 4) * kScanThreads + threadIdx.x;
      if (place < kMaxListed) listed[place] = order_of(x[i], 4 * group + i % 4);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool is_whole = s.size <= kMaxListed;
    chunk->num_listed = is_whole ? s.size : 0;
    chunk->bound = !is_whole ? kNoList : bound > minus_inf() ? ordered_key(bound) : 0;
  }
}

// The values of a chunk that are this thread's: groups first + j * kScanThreads + threadIdx.x.
__device__ __forceinline__ void scan_load(const Row& row, int first_group, int end_group,
                                          float (&x)[kScanValues]) {
#pragma unroll
  for (int j = 0; j < kScanGroups; ++j) {
    const int group = first_group + j * kScanThreads + threadIdx.x;
    Vec<float, 4> v{{minus_inf(), minus_inf(), minus_inf(), minus_inf()}};
    if (group < end_group) v = row.group(group);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * j + i] = v.v[i];
  }
}
