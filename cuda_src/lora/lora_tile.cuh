// Tiles of tokens of one LoRA adapter: which tile a block computes.
//
// `order` holds the tokens sorted by adapter. Adapter s has order[offsets[s] : offsets[s + 1]], and
// the tokens from offsets[num_adapters] on have none: they are group number num_adapters. A tile is
// up to kTokens consecutive entries of one group. The host knows an upper bound of the number of
// tiles only, so that surplus blocks find no tile.
#pragma once

#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;
constexpr int kGroupsPerLane = 9;  // 256 adapters and the group of tokens without one, by 32 lanes

// Entries [begin, begin + count) of `order`, of one group. A count of 0: no tile.
struct LoraTile {
  int group, begin, count;
};

// The beginning of a group in `order`, within [0, num_tokens] whatever `offsets` holds.
__device__ __forceinline__ int group_begin(const int* offsets, int group, int num_adapters,
                                           int num_tokens) {
  return group > num_adapters ? num_tokens : min(max(offsets[group], 0), num_tokens);
}

// Tile number `tile` of kTokens tokens. `num_groups` is num_adapters, or one more to include tokens
// without an adapter. Each warp computes it from `offsets`; all its lanes must call.
template <int kTokens>
__device__ __forceinline__ LoraTile find_tile(const int* offsets, int num_groups, int num_adapters,
                                              int num_tokens, int tile) {
  const int lane_idx = threadIdx.x % kWarpSize;
  const int per_lane = (num_groups + kWarpSize - 1) / kWarpSize;
  const int first = lane_idx * per_lane;
  int begins[kGroupsPerLane + 1];
#pragma unroll
  for (int i = 0; i <= kGroupsPerLane; ++i)
    begins[i] = i <= per_lane && first + i <= num_groups
                    ? group_begin(offsets, first + i, num_adapters, num_tokens)
                    : 0;  // the count of a group that does not exist is negative or 0
  int own = 0;
#pragma unroll
  for (int i = 0; i < kGroupsPerLane; ++i)
    own += (max(begins[i + 1] - begins[i], 0) + kTokens - 1) / kTokens;
  int end = own;  // tiles of this lane's groups and those of the lanes before
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int before = __shfl_up_sync(kFullMask, end, offset);
    if (lane_idx >= offset) end += before;
  }
  int left = tile - (end - own);  // number of the tile among this lane's
  LoraTile found = {0, 0, 0};
#pragma unroll
  for (int i = 0; i < kGroupsPerLane; ++i) {
    const int count = max(begins[i + 1] - begins[i], 0);
    if (left >= 0 && left * kTokens < count)
      found = {first + i, begins[i] + left * kTokens, min(kTokens, count - left * kTokens)};
    left -= (count + kTokens - 1) / kTokens;
  }
  const unsigned owners = __ballot_sync(kFullMask, found.count > 0);
  const int owner = owners ? __ffs(owners) - 1 : 0;
  found.group = __shfl_sync(kFullMask, found.group, owner);
  found.begin = __shfl_sync(kFullMask, found.begin, owner);
  found.count = __shfl_sync(kFullMask, found.count, owner);
  return found;
}

// The token of a row of a tile; -1 if the tile has fewer rows, or `order` an index out of range.
__device__ __forceinline__ int tile_token(const LoraTile& tile, const int* order, int num_tokens,
                                          int row) {
  if (row >= tile.count) return -1;
  const int token = order[tile.begin + row];
  return token >= 0 && token < num_tokens ? token : -1;
}
