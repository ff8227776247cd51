// The tile scheduler of moe_gemm_sm90.cu: the tiles of a persistent CTA and their order.
#pragma once

#include "moe_gemm/moe_config_sm90.cuh"

// Tiles are ordered by expert. An expert's tokens are divided evenly among as few tiles as
// possible, and the order covers all its tokens before it moves to the next weight rows: CTAs that
// run at the same time read the same weight rows from L2.
struct MoeScheduler {
  const int *offsets, *tiles;  // arrays in shared memory
  int num_experts, row_tiles, tile_rows;

  static __device__ __forceinline__ int token_tiles(int count) {
    return (count + kTokens - 1) / kTokens;
  }

  // Fills `tiles`. Called by one warp; a barrier must follow.
  static __device__ __forceinline__ void count_tiles(const int* offsets, int* tiles,
                                                     int num_experts, int row_tiles) {
    const int lane_idx = threadIdx.x % kWarpSize;
    const int each = (num_experts + kWarpSize - 1) / kWarpSize;
    const int begin = min(lane_idx * each, num_experts), end = min(begin + each, num_experts);
    int own = 0;
    for (int e = begin; e < end; ++e) own += token_tiles(offsets[e + 1] - offsets[e]);
    int before = own;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (lane_idx >= step) before += other;
    }
    before -= own;
    for (int e = begin; e < end; ++e) {
      tiles[e] = before * row_tiles;
      before += token_tiles(offsets[e + 1] - offsets[e]);
    }
    if (lane_idx == kWarpSize - 1) tiles[num_experts] = before * row_tiles;
  }

  __device__ __forceinline__ int count() const { return tiles[num_experts]; }

  __device__ __forceinline__ MoeTile tile(int index) const {
    int low = 0, high = num_experts;  // tiles[low] <= index < tiles[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (tiles[middle] <= index)
        low = middle;
      else
        high = middle;
    }
    const int begin = offsets[low], pairs = offsets[low + 1] - begin;
    const int parts = token_tiles(pairs), local = index - tiles[low];
    const int size = (pairs + parts - 1) / parts, first = local % parts * size;
    return {low, begin + first, min(size, pairs - first), local / parts * tile_rows};
  }
};
