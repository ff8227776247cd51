// Flash attention in true float32 on CUDA cores: one block processes one tile of query rows against
// any range of keys.
//
// kWarps warps with kWarpRows rows each; tiles of 32 keys. In Q K^T each lane owns one key, in P V
// every 32nd output column; shuffles broadcast P between the two. Intermediate values are not
// rounded. Tiles of K and of V of wide heads take turns in shared memory, which has no room for
// both. This path is for checks and small models, not for speed.
#pragma once

#include "common/attention.cuh"

template <int kHeadDim, int kWarps, int kWarpRows>
struct SimtAttention {
  using Layout = TileLayout<kHeadDim>;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kKeys = kWarpSize;
  static constexpr int kColumns = kHeadDim / kWarpSize;  // columns of O per lane
  static constexpr bool kIsWide = kHeadDim > 256;
  static constexpr int kSharedBytes =
      (kRows + (kIsWide ? 1 : 2) * kKeys) * Layout::kPitch * static_cast<int>(sizeof(scalar_t));

  float o[kWarpRows][kColumns];
  float max[kWarpRows];  // running maximum, in log2 units
  float sum[kWarpRows];  // this lane's share of the running sum of P

  template <typename Rows>
  __device__ __forceinline__ void run(scalar_t* smem, const Queries& queries, const KeyValues& kv,
                                      const Rows& rows, const ScoreRule& rule, int row_begin,
                                      int begin, int end) {
    scalar_t* const smem_k = smem + kRows * Layout::kPitch;
    scalar_t* const smem_v = kIsWide ? smem_k : smem_k + kKeys * Layout::kPitch;
    const scalar_t* q = smem + warp_idx() * kWarpRows * Layout::kPitch;
    const int warp_row = row_begin + warp_idx() * kWarpRows;
    const int low = rows.first_key(warp_row);
    const int high_last = rows.last_key(min(warp_row + kWarpRows, rows.count) - 1);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      max[r] = -kInf;
      sum[r] = 0.0f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) o[r][c] = 0.0f;
    }
    load_queries<kHeadDim, kRows, kThreads>(smem, queries, rows, row_begin);
#pragma unroll 1
    for (int key = begin / kKeys * kKeys; key < end; key += kKeys) {
      if (rows.skips(row_begin, min(row_begin + kRows, rows.count) - 1, key, kKeys)) continue;
      __syncthreads();  // SAFETY: all warps are done with the tile that is about to be overwritten.
      const bool has_keys = warp_row < rows.count && key <= high_last && key + kKeys > low;
      float p[kWarpRows];
      if constexpr (kIsWide) {
        load_tile<kHeadDim, kKeys, kThreads, 1>(smem_k, nullptr, kv, key, begin, end);
        wait_for_copies();
        if (has_keys) multiply_qk(p, q, smem_k, rows, rule, warp_row, key, kv.head_dim);
        __syncthreads();  // SAFETY: all warps are done with K, which V overwrites.
        load_tile<kHeadDim, kKeys, kThreads, 2>(nullptr, smem_v, kv, key, begin, end);
        wait_for_copies();
      } else {
        load_tile<kHeadDim, kKeys, kThreads>(smem_k, smem_v, kv, key, begin, end);
        wait_for_copies();
        if (has_keys) multiply_qk(p, q, smem_k, rows, rule, warp_row, key, kv.head_dim);
      }
      if (has_keys) multiply_pv(p, smem_v);
    }
    cp_async_wait<0>();
  }

  template <typename Writer>
  __device__ __forceinline__ void finish(scalar_t*, const RowRule& rows, int row_begin,
                                         const Writer& writer) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int row = row_begin + warp_idx() * kWarpRows + r;
      if (row >= rows.count) break;
      const float total = warp_sum(sum[r]);
      if (lane_idx() == 0) writer.row(row, max[r], total);
      const float factor = writer.factor(row, max[r], total);
      auto* out = writer.at(row);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        writer.single(out, c * kWarpSize + lane_idx(), o[r][c] * factor);
    }
  }

 private:
  __device__ static __forceinline__ int lane_idx() { return threadIdx.x % kWarpSize; }
  __device__ static __forceinline__ int warp_idx() { return threadIdx.x / kWarpSize; }

  __device__ static __forceinline__ void wait_for_copies() {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }

  // Sets the lane's P of each row, and updates max, sum and O.
  template <typename Rows>
  __device__ __forceinline__ void multiply_qk(float (&p)[kWarpRows], const scalar_t* q,
                                              const scalar_t* smem_k, const Rows& rows,
                                              const ScoreRule& rule, int warp_row, int key,
                                              int head_dim) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) p[r] = 0.0f;
    const scalar_t* k = smem_k + lane_idx() * Layout::kPitch;
#pragma unroll 4
    for (int d = 0; d < head_dim; d += kVec) {
      const Vec<scalar_t, kVec> frag_k = load_vec<scalar_t, kVec>(k + d);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const Vec<scalar_t, kVec> frag_q = load_vec<scalar_t, kVec>(q + r * Layout::kPitch + d);
#pragma unroll
        for (int i = 0; i < kVec; ++i) p[r] += to_float(frag_q.v[i]) * to_float(frag_k.v[i]);
      }
    }
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) softmax(p[r], rows, rule, r, warp_row + r, key);
  }

  __device__ __forceinline__ void multiply_pv(const float (&p)[kWarpRows], const scalar_t* smem_v) {
    const scalar_t* v = smem_v + lane_idx();
#pragma unroll 4
    for (int j = 0; j < kKeys; ++j) {
      float weight[kWarpRows];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) weight[r] = __shfl_sync(kFullMask, p[r], j);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float value = to_float(v[j * Layout::kPitch + c * kWarpSize]);
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) o[r][c] += weight[r] * value;
      }
    }
  }

  // Turns the lane's q.k into P, and updates max, sum and O of row r.
  template <typename Rows>
  __device__ __forceinline__ void softmax(float& p, const Rows& rows, const ScoreRule& rule, int r,
                                          int row, int key) {
    if (rule.inner != 0.0f) p = rule.cap(p);
    const bool seen = rows.sees(row, rows.last_key(row), key + lane_idx());
    if (!seen || !rows.in_pattern(row, key + lane_idx())) p = -kInf;
    const float new_max = fmaxf(max[r], warp_max(p) * rule.factor);
    const float base = finite_or_zero(new_max);
    const float rescale = exp2_approx(max[r] - base);
    max[r] = new_max;
    p = exp2_approx(fmaf(p, rule.factor, -base));
    sum[r] = sum[r] * rescale + p;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) o[r][c] *= rescale;
  }
};
