// Few rows of x (decoding): the weight is read once, straight from global memory into registers, 16
// bytes per load. The warps of a block share a few weight rows and split k; their partial sums are
// added in shared memory in warp order. None of this depends on m, so a row of out has the same
// bits regardless of the other rows.
#pragma once

#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "gemm/gemm_problem.cuh"
#include "gemm/skinny_loads.cuh"

// Computes 1 / rms of kTokens rows of x, from row0 on, into smem_scales. All threads of the block
// must call it. Several rows are processed together, so that their loads overlap.
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

// 16-bit types on tensor cores, with the operands of skinny_mma.cuh: the weight needs neither
// shared memory nor shuffles. A warp takes every kWarps-th group of 64 values of k (whole 128-byte
// lines).
template <int kTokenTiles, int kRowTiles, int kWarps>
struct DirectMma {
  static constexpr int kTokens = kTokenTiles * 8, kRows = kRowTiles * 16;
  static constexpr int kPitch = kRows + 4;  // 2 * kPitch is 8 mod 32: no bank conflicts
  static constexpr int kStepK = 64, kStride = kWarps * kStepK;
  using V = Vec<scalar_t, kVec>;

  const Problem& p;
  int warp_idx, g, t;
  int col0, row0;  // first row of the weight, first row of x
  const scalar_t *weight, *x;

  __device__ __forceinline__ explicit DirectMma(const Problem& p) : p(p) {
    const int lane_idx = threadIdx.x % kWarpSize;
    warp_idx = threadIdx.x / kWarpSize;
    g = lane_idx / 4, t = lane_idx % 4;
    col0 = blockIdx.x * kRows, row0 = blockIdx.y * kTokens;
    weight = p.weight + (static_cast<int64_t>(col0) + g) * p.k + t * kVec;
    x = p.x + (static_cast<int64_t>(row0) + g) * p.x_stride + t * kVec;
  }

  __device__ __forceinline__ bool has_k(int k, int half) const {
    return k + half * 32 + t * kVec < p.k;
  }

  __device__ __forceinline__ void load_weight(V (&w)[kRowTiles * 2][2], int k) const {
#pragma unroll
    for (int r = 0; r < kRowTiles * 2; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool valid = col0 + g + r * 8 < p.n && has_k(k, half);
        w[r][half] =
            valid ? load_vec_once(weight + static_cast<int64_t>(r * 8) * p.k + k + half * 32) : V{};
      }
  }

  template <bool kNorm>
  __device__ __forceinline__ void load_tokens(V (&tokens)[kTokenTiles][2], int k,
                                              const float* smem_scales) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_inside = has_k(k, half);
      V norm_weight = {};
      if (kNorm && is_inside)
        norm_weight = load_vec<scalar_t, kVec>(p.norm.weight + k + half * 32 + t * kVec);
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) {
        V& v = tokens[i][half];
        v = V{};
        if (!is_inside || row0 + i * 8 + g >= p.m) continue;
        v = load_vec<scalar_t, kVec>(x + i * 8 * p.x_stride + k + half * 32);
        if constexpr (kNorm) {
#pragma unroll
          for (int j = 0; j < kVec; ++j)
            v.v[j] = p.norm.apply(v.v[j], smem_scales[i * 8 + g], norm_weight.v[j]);
        }
      }
    }
  }

  __device__ __forceinline__ static void multiply(float (&acc)[kRowTiles][kTokenTiles][4],
                                                  const V (&w)[kRowTiles * 2][2],
                                                  const V (&tokens)[kTokenTiles][2]) {
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

  __device__ __forceinline__ void store(const float (&acc)[kRowTiles][kTokenTiles][4],
                                        float* smem_partials) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) {
        float* to = smem_partials + (warp_idx * kTokens + i * 8 + t * 2) * kPitch + r * 16 + g;
        to[0] = acc[r][i][0], to[kPitch] = acc[r][i][1];
        to[8] = acc[r][i][2], to[kPitch + 8] = acc[r][i][3];
      }
  }
};

template <int kTokenTiles, int kRowTiles, int kWarps, bool kNorm>
__device__ __forceinline__ void skinny_direct_mma(const Problem& p) {
  using Mma = DirectMma<kTokenTiles, kRowTiles, kWarps>;
  using V = typename Mma::V;
  __shared__ float smem_partials[kWarps * Mma::kTokens * Mma::kPitch];
  __shared__ float smem_scales[Mma::kTokens];
  const Mma mma(p);

  V next[kRowTiles * 2][2];
  mma.load_weight(next, mma.warp_idx * Mma::kStepK);  // stays in flight while the norm is computed
  if constexpr (kNorm) direct_row_scales<Mma::kTokens, kWarps>(p, mma.row0, smem_scales);
  float acc[kRowTiles][kTokenTiles][4] = {};
#pragma unroll 1  // unrolled by two, registers would allow only one block per multiprocessor
  for (int k = mma.warp_idx * Mma::kStepK; k < p.k; k += Mma::kStride) {
    V w[kRowTiles * 2][2], tokens[kTokenTiles][2];
#pragma unroll
    for (int r = 0; r < kRowTiles * 2; ++r) w[r][0] = next[r][0], w[r][1] = next[r][1];
    mma.template load_tokens<kNorm>(tokens, k, smem_scales);
    mma.load_weight(next, k + Mma::kStride);
    Mma::multiply(acc, w, tokens);
  }
  mma.store(acc, smem_partials);
  direct_finish<Mma::kTokens, Mma::kRows, Mma::kPitch, kWarps>(p, smem_partials, mma.row0,
                                                               mma.col0);
}

// float32 on CUDA cores, without TF32. A warp takes every kWarps-th group of 128 values of k in
// kRows weight rows; shuffles add its lanes' sums.
template <int kTokens, int kRows, int kWarps, bool kNorm>
__device__ __forceinline__ void skinny_direct_simt(const Problem& p) {
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
  load_weight(next, threadIdx.x * kVec);  // stays in flight while the norm is computed
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
