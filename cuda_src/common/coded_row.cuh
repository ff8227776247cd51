// Quantizes a row to codes and scales, for any source of its values.
#pragma once

#include "common/codes.cuh"
#include "common/packed.cuh"
#include "common/pdl.cuh"

constexpr int kGroup = 128;                 // columns per scale, unless the whole row shares one
constexpr int kGroupLanes = kGroup / kVec;  // 16-byte vectors per group
static_assert(kGroupLanes <= kWarpSize, "a group's lanes are of one warp");

struct CodedRow {
  unsigned char* codes;
  float* scales;  // one scale, or one per group
  int n, group;   // group is 0 or kGroup
};

// Returns the maximum over the block to every thread; contains two block barriers.
template <int kThreads>
__device__ __forceinline__ float block_max_or_nan(float x, float* smem) {
  x = lanes_max_or_nan<kWarpSize>(x);
  __syncthreads();  // SAFETY: threads may still be reading `smem` from the previous call.
  if (threadIdx.x % kWarpSize == 0) smem[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  float peak = smem[0];
#pragma unroll
  for (int i = 1; i < kThreads / kWarpSize; ++i) peak = max_or_nan(peak, smem[i]);
  return peak;
}

// Quantizes a row held in registers: thread t holds vectors t, t + kThreads, ..., with zeros past
// the row's end. All threads of the block must call it.
template <typename Codes, int kThreads, int kVectors>
__device__ __forceinline__ void quantize_registers(const CodedRow& row,
                                                   const Packed<kVec> (&x)[kVectors], float* smem) {
  if (row.group == 0) {
    float peak = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) peak = peak_of(unpack<kVec>(x[k]), peak);
    peak = block_max_or_nan<kThreads>(peak, smem);
    if (threadIdx.x == 0) row.scales[0] = code_scale<Codes>(peak);
    const float factor = code_factor<Codes>(peak);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = (k * kThreads + static_cast<int>(threadIdx.x)) * kVec;
      if (i < row.n) store_codes<Codes>(row.codes + i, unpack<kVec>(x[k]), factor);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int i = (k * kThreads + static_cast<int>(threadIdx.x)) * kVec;
    const float peak = lanes_max_or_nan<kGroupLanes>(peak_of(unpack<kVec>(x[k]), 0.0f));
    if (i >= row.n) continue;
    if (i % kGroup == 0) row.scales[i / kGroup] = code_scale<Codes>(peak);
    store_codes<Codes>(row.codes + i, unpack<kVec>(x[k]), code_factor<Codes>(peak));
  }
}

// Quantizes a row of any length and alignment; calls `value(i)` twice for each column.
template <typename Codes, int kThreads, typename Value>
__device__ __forceinline__ void quantize_any(const CodedRow& row, const Value& value, float* smem) {
  const int lane_idx = threadIdx.x % kWarpSize, warp_idx = threadIdx.x / kWarpSize;
  using One = Vec<scalar_t, 1>;
  if (row.group == 0) {
    float peak = 0.0f;
    for (int i = threadIdx.x; i < row.n; i += kThreads) peak = peak_of(One{value(i)}, peak);
    peak = block_max_or_nan<kThreads>(peak, smem);
    if (threadIdx.x == 0) row.scales[0] = code_scale<Codes>(peak);
    const float factor = code_factor<Codes>(peak);
    for (int i = threadIdx.x; i < row.n; i += kThreads)
      store_codes<Codes>(row.codes + i, One{value(i)}, factor);
    return;
  }
  for (int first = warp_idx * kGroup; first < row.n; first += kThreads / kWarpSize * kGroup) {
    One x[kGroup / kWarpSize];
    float peak = 0.0f;
#pragma unroll
    for (int j = 0; j < kGroup / kWarpSize; ++j) {
      const int i = first + j * kWarpSize + lane_idx;
      x[j] = One{i < row.n ? value(i) : from_float<scalar_t>(0.0f)};
      peak = peak_of(x[j], peak);
    }
    peak = lanes_max_or_nan<kWarpSize>(peak);
    if (lane_idx == 0) row.scales[first / kGroup] = code_scale<Codes>(peak);
#pragma unroll
    for (int j = 0; j < kGroup / kWarpSize; ++j) {
      const int i = first + j * kWarpSize + lane_idx;
      if (i < row.n) store_codes<Codes>(row.codes + i, x[j], code_factor<Codes>(peak));
    }
  }
}

__device__ __forceinline__ CodedRow coded_row(unsigned char* codes, float* scales, int64_t row,
                                              int n, int group) {
  const int num_scales = group == 0 ? 1 : max(1, (n + group - 1) / group);
  return CodedRow{codes + row * n, scales + row * num_scales, n, group};
}

// Entry points `op_codes_size` of a kernel template kernel<Codes, kThreads, kVectors>; 0 vectors:
// rows of any length. The sizes must match engine/kernels/_quantize.py;
// tests/kernels/test_cuda_constants.py checks them.
#define ENGINE_QUANTIZE_ENTRIES(ENTRY, op, codes, Codes) \
  ENTRY(op##_##codes##_1, Codes, 128, 1)                 \
  ENTRY(op##_##codes##_4, Codes, 256, 2)                 \
  ENTRY(op##_##codes##_8, Codes, 256, 4)                 \
  ENTRY(op##_##codes##_16, Codes, 512, 4)                \
  ENTRY(op##_##codes##_any, Codes, 256, 0)
