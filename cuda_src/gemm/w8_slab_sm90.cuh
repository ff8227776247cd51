// Products of a slab of 8-bit codes, and the scales of their sums.
#pragma once

#include "common/wgmma_codes.cuh"
#include "gemm/gemm_consumer_sm90.cuh"

constexpr int kScaleBlock = 128;
static_assert(kSlabK == kScaleBlock, "a slab of k is a block of scales");
#ifdef BLOCKS
constexpr bool kBlocks = BLOCKS;
static_assert(kIsSwapped || !kBlocks || kScaleBlock % kTileN == 0,
              "a tile has columns of one block");
#else
constexpr bool kBlocks = false;
#endif
constexpr bool kGroups = kBlocks || kCodes == 2;  // x has a scale per group of 128 values of k
// Accumulator type of a slab.
template <int kCodes>
struct SlabSum {
  using type = float;
};
template <>
struct SlabSum<2> {
  using type = int;
};

struct W8Scales {
  const float* x;       // (M,), or (M, ceil(K / 128)) with kGroups
  const float* weight;  // (N,), or (ceil(N / 128), ceil(K / 128)) with kBlocks
  int num_groups;       // ceil(K / 128)
};

// Multiplies the slab at these addresses, overwriting `acc`.
template <typename Sum>
__device__ __forceinline__ void multiply_slab(Sum (&acc)[kWarpgroupCols / 2], unsigned rows,
                                              unsigned columns) {
  const uint64_t a = wgmma_descriptor(rows), b = wgmma_descriptor(columns);
#pragma unroll
  for (int step = 0; step < kSlabK / 32; ++step)
    wgmma_codes<kWarpgroupCols>(acc, a + step * 2, b + step * 2, step > 0);
}
