// Walks a row of logits, and selects the first logits of its order without sorting.
//
// The order is (logit descending, id ascending), which is the descending order of the distinct
// 54-bit numbers order_of(logit, id) = ordered_key(logit) << 22 | 2^22 - 1 - id.
#pragma once

#include "sample/block.cuh"
#include "sample/exact_math.cuh"
#include "common/types.cuh"

constexpr int kIdBits = 22;  // ids of vocabularies up to 2^22
constexpr uint32_t kIdMask = (1u << kIdBits) - 1;

__device__ __forceinline__ float minus_inf() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ uint64_t order_of(float logit, int id) {
  return static_cast<uint64_t>(ordered_key(logit)) << kIdBits |
         (kIdMask - static_cast<uint32_t>(id));
}
__device__ __forceinline__ uint32_t key_of(uint64_t order) {
  return static_cast<uint32_t>(order >> kIdBits);
}
__device__ __forceinline__ float logit_of(uint64_t order) {
  return from_ordered_key(key_of(order));
}
__device__ __forceinline__ int id_of(uint64_t order) {
  return static_cast<int>(kIdMask - (static_cast<uint32_t>(order) & kIdMask));
}

// One row of logits, read in groups of four ids.
struct Row {
  const float* data;
  int size;
  bool is_aligned;  // aligned to 16 bytes

  __device__ __forceinline__ Row(const float* data, int size)
      : data(data), size(size), is_aligned(reinterpret_cast<uint64_t>(data) % 16 == 0) {}
  __device__ __forceinline__ int num_groups() const { return (size + 3) / 4; }

  // Logits of ids 4 * group .. 4 * group + 3; -inf past the end.
  __device__ __forceinline__ Vec<float, 4> group(int group) const {
    const int id = 4 * group;
    if (is_aligned && id + 4 <= size) return load_vec<float, 4>(data + id);
    Vec<float, 4> x;
#pragma unroll
    for (int i = 0; i < 4; ++i) x.v[i] = id + i < size ? data[id + i] : minus_inf();
    return x;
  }
};

// Loads in flight per thread during a walk: as many as registers allow.
constexpr int kLoads = __CUDA_ARCH__ >= 1200 ? 2 : 4;

// Calls body(logits, group) for the groups [begin, end) of four ids, spread over the block's
// threads. After every kLoads groups per thread, all threads of the block call after_batch()
// together.
template <typename Body, typename AfterBatch>
__device__ __forceinline__ void for_each_group(const Row& row, int begin, int end, Body body,
                                               AfterBatch after_batch) {
#pragma unroll 1
  for (int base = begin; base < end; base += kLoads * blockDim.x) {
    Vec<float, 4> x[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int group = base + j * blockDim.x + threadIdx.x;
      if (group < end) x[j] = row.group(group);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int group = base + j * blockDim.x + threadIdx.x;
      if (group < end) body(x[j], group);
    }
    after_batch();
  }
}

// Calls body(logit, id) once for every id of the row, spread over the block's threads.
template <typename Body>
__device__ __forceinline__ void for_each_id(const Row& row, Body body) {
  for_each_group(
      row, 0, row.num_groups(),
      [&](const Vec<float, 4>& x, int group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (4 * group + i < row.size) body(x.v[i], 4 * group + i);
        }
      },
      [] {});
}

constexpr int kBins = 2048;

// Counts and masses by bin. A 64-bit mass is two words; the thread whose addition overflows the low
// word carries. The sums are integers, so the order of the atomics does not matter.
struct Histogram {
  uint32_t count[kBins], low[kBins], high[kBins];

  __device__ __forceinline__ void add(int bin, uint64_t mass) {
    const uint32_t part = static_cast<uint32_t>(mass);
    const uint32_t before = atomicAdd(&low[bin], part);
    const uint32_t rest = static_cast<uint32_t>(mass >> 32) + (before + part < before ? 1u : 0u);
    if (rest != 0) atomicAdd(&high[bin], rest);
    atomicAdd(&count[bin], 1u);
  }
  __device__ __forceinline__ uint64_t mass(int bin) const {
    return static_cast<uint64_t>(high[bin]) << 32 | low[bin];
  }
};

struct SelectShared {
  Histogram bins;
  uint64_t scratch[32];
  uint64_t rest;    // mass still needed from the chosen bin
  int bin, before;  // the chosen bin, and the count in the bins before it
  bool is_done;
};

// Finds the shortest prefix of the order whose masses add up to `target`. Returns a threshold:
// logits of the prefix have order numbers >= the threshold, all other logits with a mass have lower
// ones. mass_of(order, logit) is an integer: 0 if not a candidate; to count candidates, 1 for each.
// All masses must add up to at least `target`, which is >= 1.
//
// A radix search from the top digit: at most five passes over the row, fewer if a whole bin is
// taken. The block has kWarps * 32 threads, which divide kBins.
template <int kWarps, typename MassOf>
__device__ uint64_t select_order(const Row& row, MassOf mass_of, uint64_t target, SelectShared& s) {
  constexpr int kBinsPerThread = kBins / (kWarps * kWarpSize);
  uint64_t prefix = 0;
  int shift = 32 + kIdBits;
#pragma unroll 1
  while (shift > 0) {
    const int width = shift == 32 ? 10 : 11;  // three digits of the logit's key, two of the id
    shift -= width;
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) {
      s.bins.count[i] = s.bins.low[i] = s.bins.high[i] = 0;
    }
    __syncthreads();
    for_each_id(row, [&](float logit, int id) {
      const uint64_t order = order_of(logit, id);
      if (order >> (shift + width) != prefix) return;
      const uint64_t own = mass_of(order, logit);
      if (own != 0) s.bins.add(static_cast<int>(order >> shift) & ((1 << width) - 1), own);
    });
    __syncthreads();
    const int top_bin = kBins - 1 - kBinsPerThread * static_cast<int>(threadIdx.x);
    uint64_t mine = 0, total;
    for (int i = 0; i < kBinsPerThread; ++i) mine += s.bins.mass(top_bin - i);
    uint64_t before = block_inclusive_scan<kWarps>(mine, s.scratch, &total) - mine;
    if (before < target && target <= before + mine) {  // true in exactly one thread
      int bin = top_bin;
      while (before + s.bins.mass(bin) < target) before += s.bins.mass(bin--);
      s.bin = bin;
      s.rest = target - before;
      s.is_done = s.bins.count[bin] == 1 || s.bins.mass(bin) == s.rest;
    }
    __syncthreads();
    prefix = prefix << width | static_cast<uint64_t>(s.bin);
    target = s.rest;
    const bool is_done = s.is_done;
    __syncthreads();  // SAFETY: all have read the choice before the next digit overwrites it.
    if (is_done) break;
  }
  return prefix << shift;
}
