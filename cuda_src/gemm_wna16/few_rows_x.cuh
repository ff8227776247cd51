// x in shared memory, normalised on the way if there is a norm.
#pragma once

#include "gemm_wna16/few_rows_block.cuh"

constexpr int kXPieces = 4;  // of 16 bytes, that a thread loads at a time
constexpr int kMaxWarps = 16;

struct NormShared {
  float partials[kMaxWarps];
  float scales[32];  // of each token
};

__device__ __forceinline__ float sum_of_squares(const Vec<scalar_t, kVec>& v) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kVec; ++j) sum += to_float(v.v[j]) * to_float(v.v[j]);
  return sum;
}

__device__ __forceinline__ void apply_norm(const FewRowsParams& p, Vec<scalar_t, kVec>& v,
                                           float scale, int column) {
  const Vec<scalar_t, kVec> w = load_vec<scalar_t, kVec>(p.norm_weight + column);
#pragma unroll
  for (int j = 0; j < kVec; ++j)
    v.v[j] = from_float<scalar_t>(to_float(v.v[j]) * scale * (to_float(w.v[j]) + p.weight_offset));
}

// Normalises the rows that lie in shared memory. Ends without a barrier.
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
      apply_norm(p, v, shared.scales[token], i * kVec);
      store_vec(at, v);
    }
}

// One row, which stays in registers until it is normalised.
__device__ __forceinline__ void load_row(const FewRowsParams& p, const FewRowsBlock& b,
                                         NormShared& shared) {
  const int vectors = p.k / kVec, padded = b.x_columns / kVec;
  Vec<scalar_t, kVec> v[kXPieces];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kXPieces; ++j) {
    const int i = b.thread + j * b.threads;
    v[j] = Vec<scalar_t, kVec>{};
    if (i < vectors) v[j] = load_vec<scalar_t, kVec>(p.x + i * kVec);
  }
  if (p.norm_weight != nullptr) {
#pragma unroll
    for (int j = 0; j < kXPieces; ++j) sum += sum_of_squares(v[j]);
    sum = warp_sum(sum);
    if (b.lane_idx == 0) shared.partials[b.warp_idx] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < b.num_warps; ++i) sum += shared.partials[i];
    const float scale = 1.0f / sqrtf(sum / p.k + p.eps);
#pragma unroll
    for (int j = 0; j < kXPieces; ++j) {
      const int i = b.thread + j * b.threads;
      if (i < vectors) apply_norm(p, v[j], scale, i * kVec);
    }
  }
#pragma unroll
  for (int j = 0; j < kXPieces; ++j) {
    const int i = b.thread + j * b.threads;
    if (i < padded) store_vec(b.x_row(0) + i * kVec, v[j]);
  }
}

// Copies x to shared memory, with zeros behind each row. Ends with a barrier of the block.
__device__ __forceinline__ void load_x(const FewRowsParams& p, const FewRowsBlock& b,
                                       NormShared& shared) {
  const int vectors = p.k / kVec, padded = b.x_columns / kVec;
  if (p.m == 1 && padded <= b.threads * kXPieces) {
    load_row(p, b, shared);
    __syncthreads();
    return;
  }
  const int count = p.m * padded;
  for (int first = b.thread; first < count; first += b.threads * kXPieces) {
    Vec<scalar_t, kVec> v[kXPieces];
#pragma unroll
    for (int j = 0; j < kXPieces; ++j) {
      const int index = first + j * b.threads, token = index / padded, i = index % padded;
      v[j] = Vec<scalar_t, kVec>{};
      if (index < count && i < vectors)
        v[j] = load_vec<scalar_t, kVec>(p.x + token * p.x_stride + i * kVec);
    }
#pragma unroll
    for (int j = 0; j < kXPieces; ++j) {
      const int index = first + j * b.threads, token = index / padded, i = index % padded;
      if (index < count) store_vec(b.x_row(token) + i * kVec, v[j]);
    }
  }
  if (p.norm_weight != nullptr) normalise(p, b, shared);
  __syncthreads();
}
