// The rows of x in shared memory, normalised if the op has a norm.
#pragma once

#include "common/reduce.cuh"
#include "gemm/skinny_block.cuh"
#include "gemm/skinny_loads.cuh"

// A row's squares are summed in chunks, one warp per chunk: 256 values of k, doubled until at most
// kSquareChunks chunks remain. A norm's bits therefore depend neither on the block's size nor on m.
constexpr int kSquareChunks = 16;

struct RowSquares {
  __align__(16) float of[kSquareChunks];

  __device__ __forceinline__ float sum() const {
    if constexpr (kSumsInParts) {  // one warp after another
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) total += of[i];
      return total;
    } else {
      float s[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 v = *reinterpret_cast<const float4*>(of + i * 4);
        s[i] = (v.x + v.y) + (v.z + v.w);
      }
      return (s[0] + s[1]) + (s[2] + s[3]);
    }
  }
  __device__ __forceinline__ float scale(const Problem& p) const {
    return 1.0f / sqrtf(sum() / p.k + p.norm.eps);
  }
};

__device__ __forceinline__ float sum_of_squares(const Vec<scalar_t, kVec>& v, float sum) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) sum += to_float(v.v[j]) * to_float(v.v[j]);
  return sum;
}

// Returns the index of this thread's j-th 16-byte piece of a row. With a norm and kSumsInParts only
// as many threads as in rmsnorm_row.cuh have pieces, up to two each, so that squares add up alike.
template <bool kNorm, typename Shape>
__device__ __forceinline__ int row_piece(const Problem& p, const SkinnyBlock<Shape>& b, int j) {
  if constexpr (kNorm && kSumsInParts) {
    constexpr int kPair = 2 * kWarpSize * kVec;  // values of two pieces of a warp
    const int threads = (p.k <= kPair       ? 1
                         : p.k <= 2 * kPair ? 2
                         : p.k <= 4 * kPair ? 4
                                            : 8) *
                        kWarpSize;
    return b.thread < threads ? b.thread + j * threads : p.k;
  } else {
    return b.thread + j * b.threads;
  }
}

// Sums the squares of a row whose pieces the threads hold, zeros past its end. A barrier must
// follow.
template <int kPieces, typename Shape>
__device__ __forceinline__ void sum_row_squares(const Vec<scalar_t, kVec> (&x)[kPieces],
                                                int vectors, const SkinnyBlock<Shape>& b,
                                                RowSquares& squares) {
  if constexpr (kSumsInParts) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) sum = sum_of_squares(x[j], sum);
    sum = warp_sum(sum);
    if (b.lane_idx == 0 && b.warp_idx < kSquareChunks) squares.of[b.warp_idx] = sum;
  } else {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int chunk = b.warp_idx + j * b.num_warps;
      if (chunk * kWarpSize >= vectors) break;
      const float sum = warp_sum(sum_of_squares(x[j], 0.0f));
      if (b.lane_idx == 0) squares.of[chunk] = sum;
    }
  }
}

// Zero-fills x after the block's slice, up to a whole step of k. A barrier must follow.
template <typename Shape>
__device__ __forceinline__ void skinny_pad_x(const Problem& p, const SkinnyBlock<Shape>& b) {
  const int count = b.slice_end - b.slice_begin;
  const int pad = ((count + kStepK - 1) / kStepK * kStepK - count) / kVec;
  if (b.thread < pad)
    for (int row = 0; row < p.m; ++row)
      store_vec(b.x_row(row) + count + b.thread * kVec, Vec<scalar_t, kVec>{});
}

// A single row of x, copied from L2 to shared memory through registers: less latency than a bulk
// copy, and the norm is applied on the way.
template <typename Shape, bool kNorm>
struct SingleRow {
  using V = Vec<scalar_t, kVec>;
  static constexpr int kPieces = 4;  // 16-byte pieces per thread
  V x[kPieces], w[kNorm ? kPieces : 1];

  __device__ __forceinline__ static bool fits(const Problem& p, const SkinnyBlock<Shape>& b) {
    const bool is_whole = !kNorm || (b.size == 1 && p.k <= kSquareChunks * kWarpSize * kVec);
    return p.m == 1 && is_whole && b.slice_end - b.slice_begin <= b.threads * kVec * kPieces;
  }

  __device__ __forceinline__ static void load(V (&to)[kPieces], const scalar_t* from,
                                              const Problem& p, const SkinnyBlock<Shape>& b) {
    const int vectors = (b.slice_end - b.slice_begin) / kVec;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      to[j] = V{};
      const int i = row_piece<kNorm>(p, b, j);
      if (i < vectors) to[j] = load_from_l2(from + b.slice_begin + i * kVec);
    }
  }

  __device__ __forceinline__ void load_norm(const Problem& p, const SkinnyBlock<Shape>& b) {
    if constexpr (kNorm) load(w, p.norm.weight, p, b);
  }
  __device__ __forceinline__ void load_x(const Problem& p, const SkinnyBlock<Shape>& b) {
    load(x, p.x, p, b);
  }

  // Ends with a block barrier.
  __device__ __forceinline__ void store(const Problem& p, const SkinnyBlock<Shape>& b,
                                        RowSquares& squares) {
    const int vectors = (b.slice_end - b.slice_begin) / kVec;
    if constexpr (kNorm) {
      sum_row_squares(x, vectors, b, squares);
      __syncthreads();
      const float scale = squares.scale(p);
#pragma unroll
      for (int j = 0; j < kPieces; ++j)
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[j].v[i] = p.norm.apply(x[j].v[i], scale, w[j].v[i]);
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int i = row_piece<kNorm>(p, b, j);
      if (i < vectors) store_vec(b.x_row(0) + i * kVec, x[j]);
    }
    __syncthreads();
  }
};

// Starts copying the block's slice of each row of x to shared memory. The mbarrier counts the
// bytes.
template <typename Shape>
__device__ __forceinline__ void skinny_load_x(const Problem& p, const SkinnyBlock<Shape>& b,
                                              TransactionBarrier& barrier) {
  const int count = b.slice_end - b.slice_begin;
  const scalar_t* from = p.x + b.slice_begin;
  if constexpr (kHasClusters) {  // GPUs with clusters also have bulk copies
    if (b.warp_idx == 0) {
      if (b.lane_idx == 0) barrier.arrive_expect_tx(p.m * count * 2);
      __syncwarp();
      if (count > 0)
        for (int row = b.lane_idx; row < p.m; row += kWarpSize)
          barrier.bulk_load(b.x_row(row), from + row * p.x_stride, count * 2);
    }
  } else {
    const int vectors = count / kVec;
#pragma unroll 1
    for (int row = 0; row < p.m; ++row)
#pragma unroll 4
      for (int i = b.thread; i < vectors; i += b.threads)
        store_vec(b.x_row(row) + i * kVec,
                  load_vec<scalar_t, kVec>(from + row * p.x_stride + i * kVec));
  }
}

// Normalises x in shared memory. The copy may still be in flight at the start, as the squares are
// summed over whole rows read from L2. Ends with a block barrier.
template <typename Shape>
__device__ __forceinline__ void skinny_norm(const Problem& p, const SkinnyBlock<Shape>& b,
                                            TransactionBarrier& barrier, RowSquares* squares) {
  __shared__ float smem_scales[Shape::kTokens];
  using V = Vec<scalar_t, kVec>;
  const int vectors = p.k / kVec;
  int shift = 5;
  while ((vectors - 1) >> shift >= kSquareChunks) ++shift;
  const int chunks = ((vectors - 1) >> shift) + 1;
  int row = 0, chunk = b.warp_idx;
#pragma unroll 1
  for (;; chunk += b.num_warps) {
    while (chunk >= chunks) chunk -= chunks, ++row;
    if (row >= p.m) break;
    const scalar_t* x = p.x + row * p.x_stride;
    const int end = min(vectors, (chunk + 1) << shift);
    float sum = 0.0f;
#pragma unroll 2
    for (int i = (chunk << shift) + b.lane_idx; i < end; i += kWarpSize)
      sum = sum_of_squares(load_vec<scalar_t, kVec>(x + i * kVec), sum);
    sum = warp_sum(sum);
    if (b.lane_idx == 0) squares[row].of[chunk] = sum;
  }
  __syncthreads();
  for (int i = b.thread; i < p.m; i += b.threads) smem_scales[i] = squares[i].scale(p);
  barrier.wait();
  __syncthreads();
  const int slice = (b.slice_end - b.slice_begin) / kVec;
#pragma unroll 1
  for (int i = b.thread; i < slice; i += b.threads) {
    const V w = load_vec<scalar_t, kVec>(p.norm.weight + b.slice_begin + i * kVec);
#pragma unroll 1
    for (int row = 0; row < p.m; ++row) {
      scalar_t* at = b.x_row(row) + i * kVec;
      V v = load_vec<scalar_t, kVec>(at);
#pragma unroll
      for (int j = 0; j < kVec; ++j) v.v[j] = p.norm.apply(v.v[j], smem_scales[row], w.v[j]);
      store_vec(at, v);
    }
  }
  __syncthreads();
}
