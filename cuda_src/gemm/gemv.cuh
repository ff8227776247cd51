// GEMV (one row of x) for 16-bit types, with register-resident weights.
//
// A warp holds kResidentSteps steps of k of 16 weight rows in registers; every tile has its own
// block. All weights have arrived by the time the preceding kernel ends, so little work remains,
// and no weight passes through shared memory, which delivers only 128 bytes per clock. The sums
// equal those of skinny_ring.cuh bit for bit if the parts have the same length.
#pragma once

#include "gemm/skinny_loads.cuh"
#include "gemm/skinny_mma.cuh"
#include "gemm/skinny_x.cuh"

constexpr int kResidentSteps = 2;

struct ResidentWeights {
  WeightFragments step[kResidentSteps];

  // See WeightFragments.
  __device__ __forceinline__ void order() {
#pragma unroll
    for (int s = 0; s < kResidentSteps; ++s) step[s].order();
  }

  // Loads a warp's part of 16 rows, from `row0` on; gate and up may lie apart.
  template <typename Shape>
  __device__ __forceinline__ ResidentWeights(const Problem& p, const SkinnyBlock<Shape>& b,
                                             int row0) {
    const int g = b.lane_idx / 4, t = b.lane_idx % 4;
    const bool is_split = b.num_gates > 0;
    const scalar_t* low = p.weight + static_cast<int64_t>((is_split ? row0 / 2 : row0) + g) * p.k +
                          b.k_begin + t * kVec;
    const scalar_t* high = low + static_cast<int64_t>(is_split ? b.num_gates : 8) * p.k;
    const int k_left = b.k_end - b.k_begin - t * kVec;
    const bool has_low = row0 + g < p.n, has_high = row0 + 8 + g < p.n;
#pragma unroll
    for (int s = 0; s < kResidentSteps; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int k = s * kStepK + half * 64 + j * 32;
            uint4 v = {};
            if ((i == 0 ? has_low : has_high) && k < k_left)
              v = load_once((i == 0 ? low : high) + k);
            step[s].of[half][i][j] = v;
          }
  }
};

// The column of out that this lane finishes, if any.
struct GemvColumn {
  bool exists;
  int column;
  float bias, up_bias, residual;

  template <typename Shape>
  __device__ __forceinline__ GemvColumn(const Problem& p, const SkinnyBlock<Shape>& b, int row0) {
    const Epilogue& e = p.epilogue;
    const int lane_idx = b.lane_idx;
    column = (e.is_gated() ? row0 / 2 : row0) + lane_idx;
    exists = b.rank == 0 && threadIdx.y == 0 && lane_idx < (e.is_gated() ? 8 : 16) &&
             row0 + lane_idx < p.n;
    bias = up_bias = residual = 0.0f;
    if (!exists || e.bias == nullptr) return;
    const int gate = e.is_gated() && b.num_gates == 0 ? row0 + lane_idx : column;
    bias = to_float(e.bias[gate]);
    if (e.is_gated()) up_bias = to_float(e.bias[gate + (b.num_gates > 0 ? b.num_gates : 8)]);
  }
  __device__ __forceinline__ void load_residual(const Epilogue& e) {
    if (!exists || e.residual == nullptr) return;
    if (e.is_float)
      residual = static_cast<const float*>(e.residual)[column];
    else
      residual = to_float(static_cast<const scalar_t*>(e.residual)[column]);
  }
  __device__ __forceinline__ void store(const Epilogue& e, float sum, float up) const {
    float y = sum;
    if (e.is_gated())
      y = e.gated_result(sum + bias, up + up_bias);
    else if (!e.is_bare())
      y = activate(e.activation, sum + bias);
    y = e.with_residual(y, residual);
    if (e.is_float)
      static_cast<float*>(e.out)[column] = y;
    else
      static_cast<scalar_t*>(e.out)[column] = from_float<scalar_t>(y);
  }
};

// Sums row `row` of this warp's 16 over all parts, in order.
template <typename Shape>
__device__ __forceinline__ float gemv_sum(const SkinnyBlock<Shape>& b, int row) {
  const float* from = b.sums + threadIdx.z * (blockDim.y * 16) + row;
  float sum = 0.0f;
#pragma unroll 1
  for (int rank = 0; rank < b.size; ++rank)
#pragma unroll 4
    for (int part = 0; part < static_cast<int>(blockDim.y); ++part)
      sum += ld_shared_cluster(from + part * 16, rank, b.size);
  return sum;
}

// The row of x on its way from L2 to shared memory, kPieces pieces of 16 bytes per thread. The
// norm's weight is kept in shared memory at the same offsets, because the registers hold weights.
template <typename Shape, bool kNorm>
struct GemvRow {
  using V = Vec<scalar_t, kVec>;
  static constexpr int kPieces = 2;
  const Problem& p;
  scalar_t *to, *norm;
  int vectors;
  V v[kPieces];

  __device__ __forceinline__ GemvRow(const Problem& p, const SkinnyBlock<Shape>& b)
      : p(p),
        to(b.x_row(0)),
        norm(reinterpret_cast<scalar_t*>(b.sums + b.num_warps * 16)),
        vectors((b.slice_end - b.slice_begin) / kVec) {}
  __device__ __forceinline__ void load(const scalar_t* from, const SkinnyBlock<Shape>& b) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int i = row_piece<kNorm>(p, b, j);
      v[j] = V{};
      if (i < vectors) v[j] = load_from_l2(from + b.slice_begin + i * kVec);
    }
  }
  __device__ __forceinline__ void store(scalar_t* smem, const SkinnyBlock<Shape>& b) const {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int i = row_piece<kNorm>(p, b, j);
      if (i < vectors) store_vec(smem + i * kVec, v[j]);
    }
  }
  // Zero-fills x past the row's end, where the weights are zeros too.
  __device__ __forceinline__ void pad(const SkinnyBlock<Shape>& b) const {
    const int all = static_cast<int>(blockDim.y) * b.part_k / kVec;
    for (int i = vectors + b.thread; i < all; i += b.threads) store_vec(to + i * kVec, V{});
  }
  // Ends with a block barrier.
  __device__ __forceinline__ void finish(const SkinnyBlock<Shape>& b, RowSquares& squares) {
    if constexpr (kNorm) {
      sum_row_squares(v, vectors, b, squares);
      __syncthreads();
      const float scale = squares.scale(p);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int i = row_piece<kNorm>(p, b, j);
        if (i >= vectors) break;
        const V w = load_vec<scalar_t, kVec>(norm + i * kVec);
#pragma unroll
        for (int n = 0; n < kVec; ++n) v[j].v[n] = p.norm.apply(v[j].v[n], scale, w.v[n]);
      }
    }
    store(to, b);
    __syncthreads();
  }
};

// All weights are loaded before x.
template <bool kNorm>
__device__ __forceinline__ void gemv(const SkinnyParams& params) {
  using Shape = SkinnyShape<1, 1, 1>;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RowSquares smem_squares;
  pdl_trigger();
  const Problem p = make_problem(params);
  const SkinnyBlock<Shape> b(p, params, smem);
  const int g = b.lane_idx / 4, t = b.lane_idx % 4, row0 = b.row0(b.tile);
  if constexpr (kNorm)  // clears the chunks that a short row does not fill
    if (b.thread < kSquareChunks) smem_squares.of[b.thread] = 0.0f;
  GemvRow<Shape, kNorm> row(p, b);
  if constexpr (kNorm) row.load(p.norm.weight, b);
  GemvColumn column(p, b, row0);
  ResidentWeights weights(p, b, row0);
  if constexpr (kNorm) row.store(row.norm, b);
  row.pad(b);
  __syncthreads();
  if constexpr (kSumsInParts) weights.order();
  float* sums = b.sums + b.warp_idx * 16;
  const TokenFragments<Shape> x(p, b, g, t);
  // Warm-up pass before the preceding kernel has ended; its result is dropped. It brings the
  // instructions and the address translation of x into the caches.
#pragma unroll 1
  for (int pass = params.warms_up != 0 ? 0 : 1; pass < 2; ++pass) {
    if (pass == 1) {
      pdl_wait();
      column.load_residual(p.epilogue);
    }
    row.load(p.x, b);
    row.finish(b, smem_squares);
    float acc[Shape::kSets][1][4] = {};
#pragma unroll
    for (int s = 0; s < kResidentSteps; ++s)
      multiply_fragments<Shape>(acc, weights.step[s], x, s * kStepK * 2);
    if (t == 0) {
      const auto total = [&](int i) {
        float sum = acc[0][0][i];
#pragma unroll
        for (int set = 1; set < Shape::kSets; ++set) sum += acc[set][0][i];
        return sum;
      };
      sums[g] = total(0);
      sums[g + 8] = total(2);
    }
    cluster_sync(b.size);
    if (column.exists) {
      const float sum = gemv_sum(b, b.lane_idx);
      const float up = p.epilogue.is_gated() ? gemv_sum(b, b.lane_idx + 8) : 0.0f;
      if (pass == 1) column.store(p.epilogue, sum, up);
    }
  }
  if (b.size > 1) cluster_sync(b.size);  // SAFETY: other blocks may still read this block's sums.
}
