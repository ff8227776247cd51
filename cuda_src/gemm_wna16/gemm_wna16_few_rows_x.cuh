// x in shared memory, normalised on the way if the op has a norm.
#pragma once

#include "common/few_rows.cuh"
#include "common/packed.cuh"
#include "gemm_wna16/gemm_wna16_few_rows_block.cuh"

constexpr int kMaxWarps = 16;
// Whether GroupColumnsProduct is used (gemm_wna16_group_columns.cuh). Its codes keep their bias,
// also where kSumsX is false.
template <int kTokens>
constexpr bool kHasGroupColumns = kTokens <= ENGINE_COLUMN_TOKENS;
template <int kTokens>
constexpr bool kNeedsXSums =
    kHasGroupColumns<kTokens> || (kTokens == 1 && kSumsX && !kRoundsWeights);

struct NormShared {
  float partials[kMaxWarps];
  float scales[32];  // 1 / rms of each token
};

__device__ __forceinline__ float sum_of_squares(const Vec<scalar_t, kVec>& v) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVec; ++j) sum += to_float(v.v[j]) * to_float(v.v[j]);
  return sum;
}

__device__ __forceinline__ float sum_of(const Vec<scalar_t, kVec>& v) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVec; ++j) sum += to_float(v.v[j]);
  return sum;
}

// Returns the sum over a group, whose kGroup / kVec vectors are in consecutive lanes.
__device__ __forceinline__ float sum_of_group(const Vec<scalar_t, kVec>& v) {
  static_assert(kGroup / kVec <= kWarpSize, "a warp has whole groups");
  float sum = sum_of(v);
#pragma unroll
  for (int lanes = 1; lanes < kGroup / kVec; lanes *= 2)
    sum += __shfl_xor_sync(kFullMask, sum, lanes);
  return sum;
}

__device__ __forceinline__ void apply_norm(const FewRowsParams& p, Vec<scalar_t, kVec>& v,
                                           const Vec<scalar_t, kVec>& w, float scale) {
#pragma unroll
  for (int j = 0; j < kVec; ++j)
    v.v[j] = from_float<scalar_t>(to_float(v.v[j]) * scale * (to_float(w.v[j]) + p.weight_offset));
}

// Normalises the rows in shared memory. They must be whole, so this is not used in a cluster. A
// barrier must follow.
__device__ __forceinline__ void normalise(const FewRowsParams& p, const FewRowsBlock& b,
                                          NormShared& shared) {
  const int vectors = p.k / kVec;
  __syncthreads();
  for (int token = b.warp_idx; token < p.m; token += b.num_warps) {
    float sum = 0.0f;
#pragma unroll 4
    for (int i = b.lane_idx; i < vectors; i += kWarpSize)
      sum += sum_of_squares(load_vec<scalar_t, kVec>(b.x_row(token) + i * kVec));
    sum = warp_sum(sum);
    if (b.lane_idx == 0) shared.scales[token] = 1.0f / sqrtf(sum / p.k + p.eps);
  }
  __syncthreads();
  for (int token = 0; token < p.m; ++token)
    for (int i = b.thread; i < vectors; i += b.threads) {
      scalar_t* at = b.x_row(token) + i * kVec;
      Vec<scalar_t, kVec> v = load_vec<scalar_t, kVec>(at);
      apply_norm(p, v, load_vec<scalar_t, kVec>(p.norm_weight + i * kVec), shared.scales[token]);
      store_vec(at, v);
    }
}

// A single row of x, kept in registers until it is normalised.
template <bool kNorm>
struct SingleRow {
  using Words = Packed<kVec>;
  static constexpr int kPieces = kNorm ? 2 : 4;
  Words x[kPieces], w[kPieces];

  __device__ __forceinline__ static bool fits(const FewRowsParams& p, const FewRowsBlock& b) {
    return b.size == 1 && b.x_columns <= b.threads * kPieces * kVec;
  }
  __device__ __forceinline__ static void load(Words (&to)[kPieces], const scalar_t* from,
                                              const FewRowsParams& p, const FewRowsBlock& b) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int i = (b.thread + j * b.threads) * kVec;
      to[j] = Words{};
      if (i < p.k) to[j] = load_packed<kVec>(from + i);
    }
  }
  // Reads only model parameters, so it may be called before pdl_wait.
  __device__ __forceinline__ void load_norm(const FewRowsParams& p, const FewRowsBlock& b) {
    if constexpr (kNorm) load(w, p.norm_weight, p, b);
  }
  __device__ __forceinline__ void load_x(const FewRowsParams& p, const FewRowsBlock& b) {
    load(x, p.x, p, b);
  }
  // A barrier must follow.
  __device__ __forceinline__ void store(const FewRowsParams& p, const FewRowsBlock& b,
                                        NormShared& shared) {
    float scale = 0.0f;
    if constexpr (kNorm) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) sum += sum_of_squares(unpack<kVec>(x[j]));
      sum = warp_sum(sum);
      if (b.lane_idx == 0) shared.partials[b.warp_idx] = sum;
      __syncthreads();
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kMaxWarps; ++i)
        if (i < b.num_warps) sum += shared.partials[i];
      scale = 1.0f / sqrtf(sum / p.k + p.eps);
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if (j * b.threads * kVec >= b.x_columns) break;
      const int i = (b.thread + j * b.threads) * kVec;
      Vec<scalar_t, kVec> v = unpack<kVec>(x[j]);
      if constexpr (kNorm) apply_norm(p, v, unpack<kVec>(w[j]), scale);
      if (i < b.x_columns) store_vec(b.x_row(0) + i, v);
      if constexpr (kNeedsXSums<1>) {  // SAFETY: all lanes are here.
        const float sum = sum_of_group(v);
        if (i % kGroup == 0 && i < b.x_columns) b.x_sums[i / kGroup] = sum;
      }
    }
  }
};

// Starts copying the block's columns of x to shared memory, with zeros past k, as one cp.async
// group.
__device__ __forceinline__ void copy_rows(const FewRowsParams& p, const FewRowsBlock& b) {
  const int vectors = (min(p.k, b.x_begin + b.x_columns) - b.x_begin) / kVec;
  const int padded = b.x_columns / kVec, count = p.m * padded;
#pragma unroll 4
  for (int index = b.thread; index < count; index += b.threads) {
    const int token = index / padded, i = index % padded;
    const scalar_t* from = p.x + token * p.x_stride + b.x_begin + i * kVec;
    cp_async_16(b.x_row(token) + i * kVec, i < vectors ? from : p.x, i < vectors);
  }
  cp_async_commit();
}

// Waits for copy_rows, after which `groups` cp.async groups were committed; normalises the rows,
// and sums their groups. A barrier must follow.
template <bool kNorm, int kTokens>
__device__ __forceinline__ void finish_rows(const FewRowsParams& p, const FewRowsBlock& b,
                                            int groups, NormShared& shared) {
  wait_for_oldest(groups + 1);
  if constexpr (kNorm) normalise(p, b, shared);
  if constexpr (kNeedsXSums<kTokens>) {
    __syncthreads();
    const int vectors = b.x_columns / kVec, count = kTokens * vectors;
    const int padded = (count + kWarpSize - 1) / kWarpSize * kWarpSize;
    for (int index = b.thread; index < padded; index += b.threads) {  // SAFETY: by whole warps.
      const int token = index / vectors, i = index % vectors * kVec;
      const float sum = sum_of_group(load_vec<scalar_t, kVec>(b.x_row(min(token, p.m - 1)) + i));
      if (index < count && i % kGroup == 0) b.x_sums[i / kGroup * kTokens + token] = sum;
    }
  }
}
