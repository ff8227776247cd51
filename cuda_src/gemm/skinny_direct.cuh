// Few rows of x (decoding): the weight is read once, from global memory straight into registers, 16
// bytes a load. The warps of a block share a few rows of the weight and split k; their partial sums are
// added in shared memory in the order of the warps. None of this depends on m: a row of out has the
// same bits whatever rows are beside it.
#pragma once

#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "gemm/problem.cuh"
#include "gemm/skinny_loads.cuh"

// 1 / rms of kTokens rows of x from row0 on, into smem_scales. All threads of the block must call
// it. Several rows at once, so that their loads are in flight together.
template <int kTokens, int kWarps>
__device__ __forceinline__ void direct_row_scales(const Problem& p, int row0, float* smem_scales) {
  constexpr int kGroup = kTokens < 8 ? kTokens : 8;
  __shared__ float smem_sums[kWarps][kTokens];
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int first = 0; first < kTokens && row0 + first < p.m; first += kGroup) {
    const scalar_t* rows = p.x + (static_cast<int64_t>(row0) + first) * p.x_stride;
    float sums[kGroup] = {};
    for (int k = threadIdx.x * kVec; k < p.k; k += kWarps * kWarpSize * kVec) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (row0 + first + i >= p.m) break;
        const Vec<scalar_t, kVec> x = load_vec<scalar_t, kVec>(rows + i * p.x_stride + k);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[i] += to_float(x.v[j]) * to_float(x.v[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float sum = warp_sum(sums[i]);
      if (lane_idx == 0) smem_sums[warp_idx][first + i] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x < kTokens && row0 + threadIdx.x < p.m) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += smem_sums[w][threadIdx.x];
    smem_scales[threadIdx.x] = 1.0f / sqrtf(sum / p.k + p.norm.eps);
  }
  __syncthreads();
}

// Adds the warps' sums, smem_partials[warp][token][weight row], and writes the block's part of out.
template <int kTokens, int kRows, int kPitch, int kWarps>
__device__ __forceinline__ void direct_finish(const Problem& p, const float* smem_partials,
                                              int row0, int col0) {
  __syncthreads();
  for (int i = threadIdx.x; i < kTokens * kRows; i += kWarps * kWarpSize) {
    const int token = i / kRows, row = i % kRows;
    if (row0 + token >= p.m || col0 + row >= p.n) continue;
    p.epilogue.store_one(row0 + token, col0 + row, [&](int n) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        sum += smem_partials[(w * kTokens + token) * kPitch + n - col0];
      return sum;
    });
  }
}

#if ENGINE_DTYPE != 0

// Tensor cores with the weight as the 16-row operand and tokens as its 8 columns. A lane loads
// eight neighbours along k of weight rows g and g + 8, and of token g. The mma sums over k, so
// which k a fragment register stands for does not matter as long as both operands agree: the eight
// values serve two mma, the first taking values 0-3 and the second 4-7 of each lane. No shared
// memory, no shuffles. A warp takes 64 values of k (whole 128-byte lines), then every kWarps-th 64.
template <int kTokenTiles, int kRowTiles, int kWarps, bool kNorm>
__device__ __forceinline__ void skinny_direct(const Problem& p) {
  constexpr int kTokens = kTokenTiles * 8, kRows = kRowTiles * 16;
  constexpr int kPitch = kRows + 4;  // 2 * kPitch is 8 mod 32: the partial sums meet no bank twice
  constexpr int kStepK = 64, kStride = kWarps * kStepK;
  using V = Vec<scalar_t, kVec>;
  __shared__ float smem_partials[kWarps * kTokens * kPitch];
  __shared__ float smem_scales[kTokens];

  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int col0 = blockIdx.x * kRows, row0 = blockIdx.y * kTokens;
  const scalar_t* weight = p.weight + (static_cast<int64_t>(col0) + g) * p.k + t * kVec;
  const scalar_t* x = p.x + (static_cast<int64_t>(row0) + g) * p.x_stride + t * kVec;

  const auto load_weight = [&](V(&w)[kRowTiles* 2][2], int k) {
#pragma unroll
    for (int r = 0; r < kRowTiles * 2; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool valid = col0 + g + r * 8 < p.n && k + half * 32 + t * kVec < p.k;
        w[r][half] =
            valid ? load_vec_once(weight + static_cast<int64_t>(r * 8) * p.k + k + half * 32) : V{};
      }
  };

  V next[kRowTiles * 2][2];
  load_weight(next, warp_idx * kStepK);  // on its way while the norm is worked out
  if constexpr (kNorm) direct_row_scales<kTokens, kWarps>(p, row0, smem_scales);
  float acc[kRowTiles][kTokenTiles][4] = {};
#pragma unroll 1  // twice would keep more in registers than lets two blocks share a multiprocessor
  for (int k = warp_idx * kStepK; k < p.k; k += kStride) {
    V w[kRowTiles * 2][2], tokens[kTokenTiles][2];
#pragma unroll
    for (int r = 0; r < kRowTiles * 2; ++r) w[r][0] = next[r][0], w[r][1] = next[r][1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool has_k = k + half * 32 + t * kVec < p.k;
      V norm_weight = {};
      if (kNorm && has_k)
        norm_weight = load_vec<scalar_t, kVec>(p.norm.weight + k + half * 32 + t * kVec);
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) {
        V& v = tokens[i][half];
        v = V{};
        if (!has_k || row0 + i * 8 + g >= p.m) continue;
        v = load_vec<scalar_t, kVec>(x + i * 8 * p.x_stride + k + half * 32);
        if constexpr (kNorm) {
#pragma unroll
          for (int j = 0; j < kVec; ++j)
            v.v[j] = p.norm.apply(v.v[j], smem_scales[i * 8 + g], norm_weight.v[j]);
        }
      }
    }
    load_weight(next, k + kStride);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const uint4 low = *reinterpret_cast<const uint4*>(&w[r * 2][half]);
        const uint4 high = *reinterpret_cast<const uint4*>(&w[r * 2 + 1][half]);
        const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
        const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i) {
          const uint4 v = *reinterpret_cast<const uint4*>(&tokens[i][half]);
          const uint32_t b0[2] = {v.x, v.y}, b1[2] = {v.z, v.w};
          mma_m16n8k16<scalar_t>(acc[r][i], a0, b0);
          mma_m16n8k16<scalar_t>(acc[r][i], a1, b1);
        }
      }
  }

#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      float* to = smem_partials + (warp_idx * kTokens + i * 8 + t * 2) * kPitch + r * 16 + g;
      to[0] = acc[r][i][0], to[kPitch] = acc[r][i][1];
      to[8] = acc[r][i][2], to[kPitch + 8] = acc[r][i][3];
    }
  direct_finish<kTokens, kRows, kPitch, kWarps>(p, smem_partials, row0, col0);
}

#else

// True float32 on CUDA cores. A warp takes 128 values of k of kRows rows of the weight, then every
// kWarps-th 128; its lanes' sums are added by shuffles.
template <int kTokens, int kRows, int kWarps, bool kNorm>
__device__ __forceinline__ void skinny_direct(const Problem& p) {
  constexpr int kPitch = kRows;
  constexpr int kStride = kWarps * kWarpSize * kVec;
  using V = Vec<float, kVec>;
  __shared__ float smem_partials[kWarps * kTokens * kPitch];
  __shared__ float smem_scales[kTokens];

  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  const int col0 = blockIdx.x * kRows, row0 = blockIdx.y * kTokens;
  const float* weight = p.weight + static_cast<int64_t>(col0) * p.k;
  const float* x = p.x + static_cast<int64_t>(row0) * p.x_stride;

  const auto load_weight = [&](V(&w)[kRows], int k) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      w[r] = col0 + r < p.n && k < p.k ? load_vec_once(weight + static_cast<int64_t>(r) * p.k + k)
                                       : V{};
  };

  V next[kRows];
  load_weight(next, threadIdx.x * kVec);  // on its way while the norm is worked out
  if constexpr (kNorm) direct_row_scales<kTokens, kWarps>(p, row0, smem_scales);
  float acc[kTokens][kRows] = {};
#pragma unroll 2
  for (int k = threadIdx.x * kVec; k < p.k; k += kStride) {
    V w[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) w[r] = next[r];
    V norm_weight = {};
    if constexpr (kNorm) norm_weight = load_vec<float, kVec>(p.norm.weight + k);
    load_weight(next, k + kStride);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (row0 + i >= p.m) break;
      V v = load_vec<float, kVec>(x + i * p.x_stride + k);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if constexpr (kNorm) v.v[j] = p.norm.apply(v.v[j], smem_scales[i], norm_weight.v[j]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) acc[i][r] += v.v[j] * w[r].v[j];
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kTokens; ++i)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = warp_sum(acc[i][r]);
      if (lane_idx == 0) smem_partials[(warp_idx * kTokens + i) * kPitch + r] = sum;
    }
  direct_finish<kTokens, kRows, kPitch, kWarps>(p, smem_partials, row0, col0);
}

#endif
