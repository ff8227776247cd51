// Tiles and segments: the first stage of sampling summarises each row of logits by them.
//
// A warp reads a tile of 1024 logits as eight segments of 128, and keeps the maximum of each
// segment (or of two, four or eight neighbouring segments, so that a row has at most kMaxSegments)
// as a key. The k-th largest key is a lower bound of the row's k-th largest logit, so the second
// stage rereads only the few segments that reach it. A tile also keeps sums of exponentials.
#pragma once

#include "sample/exact_math.cuh"
#include "common/reduce.cuh"
#include "sample/row_select.cuh"
#include "common/types.cuh"

constexpr int kSegment = 128;  // one 16-byte access by each lane of a warp
constexpr int kTileSegments = 8;
constexpr int kTile = kSegment * kTileSegments;
constexpr int kMaxSegments = 2048;

constexpr uint32_t kMinusInfKey = 0x007fffffu;
constexpr uint32_t kInfKey = 0xff800000u;  // keys from here up mark segments with a NaN or +inf
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kFloatMax = 3.402823466e38f;

struct Tile {
  float largest;               // -inf if no logit is finite
  float sum;                   // sum of 2^((logit - largest) * scale), within kTotalError
  float raw_largest, raw_sum;  // raw logits: their maximum, sum of exp(logit - raw_largest)
};
static_assert(sizeof(Tile) == 8 * TILE_WORDS, "engine/kernels/sample.py allocates another size");

__device__ __forceinline__ bool is_bad(float x) { return !(x < -minus_inf()); }

__device__ __forceinline__ float scale_of(float temperature) {
  return fminf(__fdiv_rn(kLog2E, temperature), kFloatMax);
}

__device__ __forceinline__ float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns the larger operand, or NaN with sign bit 0 if either is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// The lane's 32 logits of a tile; those of segment j are 128 j + 4 lane .. 128 j + 4 lane + 3.
struct TileValues {
  Vec<float, 4> v[kTileSegments];
};

__device__ __forceinline__ TileValues load_tile(const Row& row, int tile) {
  TileValues x;
  const int group = tile * (kTile / 4) + static_cast<int>(threadIdx.x) % kWarpSize;
  if (row.is_aligned && (tile + 1) * kTile <= row.size) {
#pragma unroll
    for (int j = 0; j < kTileSegments; ++j) {
      x.v[j] = load_vec<float, 4>(row.data + 4 * (group + j * kWarpSize));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kTileSegments; ++j) x.v[j] = row.group(group + j * kWarpSize);
  }
  return x;
}

// Writes the keys of the tile's segments, one per 2^shift segments; returns the largest.
__device__ __forceinline__ uint32_t store_keys(const TileValues& x, int tile, int shift,
                                               int num_segments, uint32_t* keys) {
  uint32_t key[kTileSegments];
#pragma unroll
  for (int j = 0; j < kTileSegments; ++j) {
    const float* v = x.v[j].v;
    const float largest = max_or_nan(max_or_nan(v[0], v[1]), max_or_nan(v[2], v[3]));
    key[j] = __reduce_max_sync(kFullMask, ordered_key(largest));
  }
  const int lane_idx = threadIdx.x % kWarpSize;
  uint32_t mine = 0, all = 0;
#pragma unroll
  for (int j = 0; j < kTileSegments; ++j) {
    if (j >> shift == lane_idx) mine = max(mine, key[j]);
    all = max(all, key[j]);
  }
  const int segment = tile * (kTileSegments >> shift) + lane_idx;
  if (lane_idx < (kTileSegments >> shift) && segment < num_segments) keys[segment] = mine;
  return all;
}

// Returns the sum of 2^((logit - largest) * scale) over a tile whose largest logit is not -inf.
__device__ __forceinline__ float tile_sum(const TileValues& x, float largest, float scale) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kTileSegments; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += approximate_exp2((x.v[j].v[i] - largest) * scale);
  }
  return warp_sum(sum);
}

// Returns the sum of exp(logit - largest) over a tile whose largest logit is not -inf.
__device__ __forceinline__ float tile_raw_sum(const TileValues& x, float largest) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kTileSegments; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += expf(x.v[j].v[i] - largest);
  }
  return warp_sum(sum);
}

__device__ __forceinline__ float tile_largest(const TileValues& x) {
  float largest = minus_inf();
#pragma unroll
  for (int j = 0; j < kTileSegments; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = fmaxf(largest, x.v[j].v[i]);
  }
  return warp_max(largest);
}
