// Tensor-core products of the skinny kernels: fragments of weights and tokens.
//
// The weight is mma.sync's 16-row operand; tokens are its 8 columns. A lane holds eight neighbours
// along k of weight rows g and g + 8, and of token g (g = lane / 4). mma sums over k, so a fragment
// register may stand for any k as long as both operands agree: of the eight values, the first mma
// takes 0-3 and the second 4-7 in each lane. With kSumsInParts an mma must take 16 neighbours along
// k, in any order, to return wgmma's bits: two lanes exchange halves first.
#pragma once

#include "common/mma.cuh"
#include "gemm/skinny_block.cuh"

// Exchanges half of a lane's eight neighbours along k with lane t ^ 2: of the 32 values of a quad,
// the first 16 are then in v.x and v.y, the others in v.z and v.w. Lane t holds four of each, from
// ordered_k(t) on.
__device__ __forceinline__ void order_steps(uint4& v) {
  const bool is_upper = (threadIdx.x & 2) != 0;
  const uint32_t x = __shfl_xor_sync(kFullMask, is_upper ? v.x : v.z, 2);
  const uint32_t y = __shfl_xor_sync(kFullMask, is_upper ? v.y : v.w, 2);
  if (is_upper)
    v.x = x, v.y = y;
  else
    v.z = x, v.w = y;
}
__device__ __forceinline__ int ordered_k(int t) { return t % 2 * 8 + t / 2 * 4; }

// The tokens that a lane multiplies, read from shared memory; zeros for nonexistent tokens.
template <typename Shape>
struct TokenFragments {
  const unsigned char* row;  // row of the first token
  int pitch;                 // bytes per eight rows
  int count;                 // tokens from this lane's first on; <= 0: none

  __device__ __forceinline__ TokenFragments(const Problem& p, const SkinnyBlock<Shape>& b, int g,
                                            int t)
      : row(b.x + g * b.x_pitch + threadIdx.y * b.part_k * 2 +
            (kSumsInParts ? ordered_k(t) * 2 : t * 16)),
        pitch(8 * b.x_pitch),
        count(p.m - g) {}
  __device__ __forceinline__ uint4 load(int i, int offset) const {
    uint4 v = {};
    if (count <= i * 8) return v;
    const unsigned char* at = row + i * pitch + offset;
    if constexpr (kSumsInParts) {
      const uint2 first = *reinterpret_cast<const uint2*>(at);
      const uint2 second = *reinterpret_cast<const uint2*>(at + 32);
      v = {first.x, first.y, second.x, second.y};
    } else {
      v = *reinterpret_cast<const uint4*>(at);
    }
    return v;
  }
};

// A warp's weights for one step: 16 rows x kStepK values of k, as [half][rows / 8][j].
struct WeightFragments {
  uint4 of[2][2][2];

  // Puts the values of k into the order of sums in parts.
  __device__ __forceinline__ void order() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) order_steps(of[half][i][j]);
  }
};

template <typename Shape>
__device__ __forceinline__ void multiply_fragments(
    float (&acc)[Shape::kSets][Shape::kTokenTiles][4], const WeightFragments& w,
    const TokenFragments<Shape>& x, int k_offset) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < Shape::kTokenTiles; ++i) {
        const uint4 v = x.load(i, k_offset + half * 128 + j * 64);
        const uint32_t b0[2] = {v.x, v.y}, b1[2] = {v.z, v.w};
        const uint4 low = w.of[half][0][j], high = w.of[half][1][j];
        const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
        const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
        mma_m16n8k16<scalar_t>(acc[(j * 2) % Shape::kSets][i], a0, b0);
        mma_m16n8k16<scalar_t>(acc[(j * 2 + 1) % Shape::kSets][i], a1, b1);
      }
}

// The tokens that ldmatrix loads for sums in parts. Rows past the end repeat the last one, since
// ldmatrix needs valid addresses; their sums are not used.
template <typename Shape>
struct TokenMatrices {
  unsigned at[Shape::kTokenTiles];  // shared-memory address of this lane's row

  __device__ __forceinline__ TokenMatrices(const Problem& p, const SkinnyBlock<Shape>& b, int,
                                           int) {
    const unsigned first = smem_address(b.x) + threadIdx.y * b.part_k * 2 + b.lane_idx / 8 * 16;
#pragma unroll
    for (int i = 0; i < Shape::kTokenTiles; ++i)
      at[i] = first + min(i * 8 + b.lane_idx % 8, p.m - 1) * b.x_pitch;
  }
};

// Multiplies the weights of a stage of the ring in ascending steps of 16.
template <typename Shape>
__device__ __forceinline__ void multiply_stage(float (&acc)[1][Shape::kTokenTiles][4],
                                               const unsigned char* stage, int g, int t,
                                               const TokenMatrices<Shape>& x, int k_offset) {
  const int lane_idx = g * 4 + t, row = lane_idx % 16;
  const unsigned rows = smem_address(stage) + row * 128;
  const int chunk = (lane_idx / 16) ^ (row % 8);  // chunk of step 0
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t tokens[Shape::kTokenTiles][4];
#pragma unroll
      for (int i = 0; i < Shape::kTokenTiles; ++i)
        ldmatrix_x4(tokens[i], x.at[i] + k_offset + half * 128 + pair * 64);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int within = (chunk ^ (pair * 4 + j * 2)) << 4;
        uint32_t a[4];
        ldmatrix_x4(a, rows + half * (Shape::kStageBytes / 2) + within);
#pragma unroll
        for (int i = 0; i < Shape::kTokenTiles; ++i)
          mma_m16n8k16<scalar_t>(acc[0][i], a, {tokens[i][j * 2], tokens[i][j * 2 + 1]});
      }
    }
}

#ifdef SUMS_IN_PARTS
template <typename Shape>
using RingTokens = TokenMatrices<Shape>;
#else
template <typename Shape>
using RingTokens = TokenFragments<Shape>;
#endif

// Multiplies the weights of a stage of the ring.
template <typename Shape>
__device__ __forceinline__ void multiply_stage(float (&acc)[Shape::kSets][Shape::kTokenTiles][4],
                                               const unsigned char* stage, int g, int t,
                                               const TokenFragments<Shape>& x, int k_offset) {
  WeightFragments w;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        w.of[half][i][j] =
            *reinterpret_cast<const uint4*>(stage + half * (Shape::kStageBytes / 2) + i * 1024 +
                                            g * 128 + (((j ^ (g & 1)) * 4 + t) << 4));
  multiply_fragments<Shape>(acc, w, x, k_offset);
}

// Adds a warp's sets of accumulators and stores the sums for the warps that share its rows.
template <typename Shape>
__device__ __forceinline__ void skinny_store_sums(
    const float (&acc)[Shape::kSets][Shape::kTokenTiles][4], float* sums, int g, int t) {
#pragma unroll
  for (int i = 0; i < Shape::kTokenTiles; ++i) {
    float sum[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[j] = acc[0][i][j];
#pragma unroll
      for (int set = 1; set < Shape::kSets; ++set) sum[j] += acc[set][i][j];
    }
    float* to = sums + (i * 8 + t * 2) * Shape::kPitch + g;
    to[0] = sum[0], to[Shape::kPitch] = sum[1], to[8] = sum[2], to[Shape::kPitch + 8] = sum[3];
  }
}
