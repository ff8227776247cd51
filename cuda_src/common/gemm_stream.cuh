// Product with few rows of x (decoding) in 16-bit types: the weights are what costs, so they stream
// once, and x stays in shared memory.
//
// k is cut into parts of k_per_split. A warp takes kRowTiles * 16 rows of the weight and one part of
// k; a block is threadIdx.y = warps along k times threadIdx.z = warps along rows, and a cluster of C
// blocks shares a tile, block r taking the parts r * blockDim.y and on. The parts' sums are added in
// their order, whoever made them: a row of out is bit for bit the same whatever m, the cluster and
// the block are, as long as k_per_split is.
//
// Every warp has a ring of its own in shared memory, filled by cp.async. So no warp ever waits for
// another one in the loop, the next tile's weights are on their way while a tile is finished, and
// the first are on their way before the kernel in front has ended (they do not depend on it).
#pragma once

#include "common/cluster.cuh"
#include "common/gemm_problem.cuh"
#include "common/mma.cuh"

#if ENGINE_DTYPE != 0

constexpr int kStreamK = 128;      // values of k a warp takes at a time: two 128-byte lines
constexpr int kMaxStreamParts = 16;  // of k

template <int kTokenTiles_, int kRowTiles_, int kSlots_, int kBuffers_>
struct StreamShape {
  static constexpr int kTokenTiles = kTokenTiles_, kRowTiles = kRowTiles_;
  static constexpr int kTokens = kTokenTiles * 8, kRows = kRowTiles * 16;  // of a warp
  static constexpr int kSlots = kSlots_, kBuffers = kBuffers_;
  static constexpr int kLoads = kRowTiles * 8;            // 16-byte loads a lane makes for a slot
  static constexpr int kSets = kTokenTiles <= 2 ? 4 : 1;  // of sums: an mma waits for the one before
  static constexpr int kSlotBytes = kLoads * kWarpSize * 16;
  static constexpr int kPitch = kRows + 4;  // 2 * kPitch is 8 mod 32: sums meet no bank twice
  static constexpr int kSumFloats = kTokens * kPitch;     // of a warp
};

// Where this block stands, and its shared memory.
template <typename Shape>
struct StreamBlock {
  int lane_idx, warp_idx, num_warps, threads, thread;
  int size, rank;          // of the cluster
  int tile, tile_step, num_tiles;
  int parts;               // of k altogether
  int part_k, k_begin, k_end;  // of this warp
  int slice_begin, slice_end;  // of this block
  int x_pitch;             // bytes from a row of x to the next: 64 mod 128, so that no bank meets twice
  unsigned char* ring;     // of this warp
  float* sums;             // [buffer][warp][token][row]
  unsigned char* x;        // [token][slice of k]

  __device__ __forceinline__ StreamBlock(const Problem& p, unsigned char* smem) {
    lane_idx = threadIdx.x;
    warp_idx = threadIdx.z * blockDim.y + threadIdx.y;
    num_warps = blockDim.y * blockDim.z;
    threads = num_warps * kWarpSize;
    thread = warp_idx * kWarpSize + lane_idx;
    size = cluster_size();
    rank = cluster_rank();
    tile = blockIdx.x / size;
    tile_step = gridDim.x / size;
    num_tiles = (p.n + blockDim.z * Shape::kRows - 1) / (blockDim.z * Shape::kRows);
    parts = size * blockDim.y;
    part_k = p.k_per_split;
    k_begin = min(p.k, (rank * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y)) * part_k);
    k_end = min(p.k, k_begin + part_k);
    slice_begin = min(p.k, rank * static_cast<int>(blockDim.y) * part_k);
    slice_end = min(p.k, slice_begin + static_cast<int>(blockDim.y) * part_k);
    x_pitch = static_cast<int>(blockDim.y) * part_k * 2 + 64;
    ring = smem + warp_idx * (Shape::kSlots * Shape::kSlotBytes);
    sums = reinterpret_cast<float*>(smem + num_warps * (Shape::kSlots * Shape::kSlotBytes));
    x = reinterpret_cast<unsigned char*>(sums + Shape::kBuffers * num_warps * Shape::kSumFloats);
  }

  __device__ __forceinline__ int row0(int tile) const {
    return (tile * static_cast<int>(blockDim.z) + static_cast<int>(threadIdx.z)) * Shape::kRows;
  }
};

// A slot of the ring is two halves of 64 values of k, each with rows of 128 bytes in eight chunks; in
// odd rows the chunks 0-3 and 4-7 change places, so that a read of eight lanes meets no bank twice.
// A warp's copy instruction covers four whole lines: what the L1's tag lookup, one line a clock,
// makes of twice as many half lines takes twice as long.

// The weights a warp reads, in the order it reads them, a slot of the ring at a time.
template <typename Shape>
struct StreamLoader {
  const Problem& p;
  const StreamBlock<Shape>& b;
  const scalar_t* from;
  int64_t row_step;
  int tile, k, rows_left, slot;
  uint32_t to;

  __device__ __forceinline__ StreamLoader(const Problem& p_, const StreamBlock<Shape>& b_)
      : p(p_), b(b_), row_step(static_cast<int64_t>(p_.k) * 4), tile(b_.tile), slot(0) {
    const int row = b.lane_idx / 8, chunk = b.lane_idx % 8;
    to = row * 128 + ((chunk ^ ((row & 1) << 2)) << 4);
    start_tile();
  }

  __device__ __forceinline__ void start_tile() {
    const int row = b.row0(tile) + b.lane_idx / 8;
    k = b.k_begin + (b.lane_idx % 8) * kVec;
    rows_left = p.n - row;
    from = p.weight + static_cast<int64_t>(row) * p.k + k;
  }

  // Always closes a group of copies, an empty one when there is nothing left.
  __device__ __forceinline__ void load() {
    if (tile < b.num_tiles && b.k_begin < b.k_end) {
      unsigned char* smem = b.ring + slot * Shape::kSlotBytes + to;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool has_k = k + half * 64 < b.k_end;
        const scalar_t* source = from + half * 64;
#pragma unroll
        for (int i = 0; i < Shape::kLoads / 2; ++i, source += row_step) {
          const bool valid = has_k && i * 4 < rows_left;
          cp_async_16(smem + half * (Shape::kSlotBytes / 2) + i * 512, valid ? source : p.weight, valid);
        }
      }
      k += kStreamK, from += kStreamK;
      if (k - (b.lane_idx % 8) * kVec >= b.k_end) tile += b.tile_step, start_tile();
    }
    cp_async_commit();
    slot = slot + 1 == Shape::kSlots ? 0 : slot + 1;
  }
};

// Begins to bring the block's slice of x's rows into shared memory, zeros up to whole steps along k.
// The barrier counts the bytes.
template <typename Shape>
__device__ __forceinline__ void stream_load_x(const Problem& p, const StreamBlock<Shape>& b, BulkBarrier& barrier) {
  const int count = b.slice_end - b.slice_begin;
  const int whole = (count + kStreamK - 1) / kStreamK * kStreamK;
  const scalar_t* from = p.x + b.slice_begin;
  if (whole > count) {
    const int pad = (whole - count) / kVec;
    for (int i = b.thread; i < p.m * pad; i += b.threads)
      store_vec(reinterpret_cast<scalar_t*>(b.x + (i / pad) * b.x_pitch) + count + (i % pad) * kVec,
                Vec<scalar_t, kVec>{});
  }
  wait_for_previous_kernel();
#if ENGINE_HAS_CLUSTERS
  if (b.warp_idx == 0) {
    if (b.lane_idx == 0) barrier.expect(p.m * count * 2);
    __syncwarp();
    if (count > 0)
      for (int row = b.lane_idx; row < p.m; row += kWarpSize)
        barrier.copy(b.x + row * b.x_pitch, from + row * p.x_stride, count * 2);
  }
#else
  const int vectors = count / kVec;
#pragma unroll 1
  for (int row = 0; row < p.m; ++row)
#pragma unroll 4
    for (int i = b.thread; i < vectors; i += b.threads)
      store_vec(reinterpret_cast<scalar_t*>(b.x + row * b.x_pitch) + i * kVec,
                load_vec<scalar_t, kVec>(from + row * p.x_stride + i * kVec));
#endif
}

// Normalises x in shared memory. The squares are added by parts of k, as the products are.
template <typename Shape>
__device__ __forceinline__ void stream_norm(const Problem& p, const StreamBlock<Shape>& b) {
  __shared__ __align__(16) float smem_squares[Shape::kTokens][kMaxStreamParts];
  __shared__ float smem_scales[Shape::kTokens];
  using V = Vec<scalar_t, kVec>;
  const int num_k = blockDim.y, slice = b.slice_end - b.slice_begin;
#pragma unroll 1
  for (int i = b.warp_idx; i < p.m * num_k; i += b.num_warps) {
    const int row = i / num_k, part = i % num_k;
    const scalar_t* x = reinterpret_cast<const scalar_t*>(b.x + row * b.x_pitch);
    const int end = min(slice, (part + 1) * b.part_k);
    float sum = 0.0f;
    for (int k = part * b.part_k + b.lane_idx * kVec; k < end; k += kWarpSize * kVec) {
      const V v = load_vec<scalar_t, kVec>(x + k);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum += to_float(v.v[j]) * to_float(v.v[j]);
    }
    sum = warp_sum(sum);
    if (b.lane_idx == 0) smem_squares[row][part] = sum;
  }
  cluster_sync(b.size);
  for (int row = b.thread; row < p.m; row += b.threads) {
    float sum = 0.0f;
    for (int rank = 0; rank < b.size; ++rank)
      for (int part = 0; part < num_k; part += 4) {
        const float4 squares = load_cluster(&smem_squares[row][part], rank, b.size);
        sum += squares.x;
        if (part + 1 < num_k) sum += squares.y;
        if (part + 2 < num_k) sum += squares.z;
        if (part + 3 < num_k) sum += squares.w;
      }
    smem_scales[row] = 1.0f / sqrtf(sum / p.k + p.norm.eps);
  }
  __syncthreads();
  const int vectors = slice / kVec;
#pragma unroll 1
  for (int i = b.thread; i < p.m * vectors; i += b.threads) {
    const int row = i / vectors, column = (i % vectors) * kVec;
    scalar_t* at = reinterpret_cast<scalar_t*>(b.x + row * b.x_pitch) + column;
    V v = load_vec<scalar_t, kVec>(at);
    const V w = load_vec<scalar_t, kVec>(p.norm.weight + b.slice_begin + column);
#pragma unroll
    for (int j = 0; j < kVec; ++j) v.v[j] = p.norm.apply(v.v[j], smem_scales[row], w.v[j]);
    store_vec(at, v);
  }
  __syncthreads();
}

// Writes four columns of a row of out.
template <typename Out>
__device__ __forceinline__ void stream_store(const Epilogue& e, int token, int column, int n,
                                             const Vec<float, 4>& sum) {
  Vec<Out, 4> y = {};
  if (e.residual != nullptr) y = e.load_residual<Out>(token, column, n);
#pragma unroll
  for (int j = 0; j < 4; ++j)  // without a residual y is 0, and -0 + 0 would lose the sign
    y.v[j] = from_float<Out>(e.residual != nullptr ? sum.v[j] + to_float(y.v[j]) : sum.v[j]);
  e.store<Out>(token, column, n, y);
}

// The sum of four rows of the weight over all parts, in their order; `from` is the first part's.
template <typename Shape>
__device__ __forceinline__ Vec<float, 4> stream_sum(const StreamBlock<Shape>& b, const float* from) {
  Vec<float, 4> sum = {};
#pragma unroll 1
  for (int rank = 0; rank < b.size; ++rank)
#pragma unroll 4
    for (int part = 0; part < static_cast<int>(blockDim.y); ++part) {
      const float4 v = load_cluster(from + part * Shape::kSumFloats, rank, b.size);
      sum.v[0] += v.x, sum.v[1] += v.y, sum.v[2] += v.z, sum.v[3] += v.w;
    }
  return sum;
}

// Adds the parts' sums of the rows that this warp shares with others, in the order of the parts, and
// writes this warp's share of them to out. `sums` are those of the block's first warp of these rows.
template <typename Shape>
__device__ __forceinline__ void stream_finish(const Problem& p, const StreamBlock<Shape>& b, int row0,
                                              const float* sums) {
  const Epilogue& e = p.epilogue;
  const int vectors = Shape::kRows >> (e.is_gated() ? 3 : 2);  // of a token
  const int step = b.parts * kWarpSize;  // the warps that share these rows
#pragma unroll 1
  for (int i = (b.rank * static_cast<int>(blockDim.y) + threadIdx.y) * kWarpSize + b.lane_idx;
       i < vectors * p.m; i += step) {
    const int token = i / vectors, vector = i % vectors;
    const int row = e.is_gated() ? vector / 2 * 16 + vector % 2 * 4 : vector * 4;
    if (row0 + row >= p.n) continue;
    const float* from = sums + token * Shape::kPitch + row;
    int column = row0 + row;
    Vec<float, 4> y = stream_sum(b, from);
    if (e.is_gated()) {
      const Vec<float, 4> up = stream_sum(b, from + 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[j] = e.gated(column + j, y.v[j], up.v[j]);
      column = Epilogue::gated_column(column);
    } else if (!e.is_bare()) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (column + j < p.n) y.v[j] = e.biased(column + j, y.v[j]);
    }
    if (e.is_float) stream_store<float>(e, token, column, e.out_columns(p.n), y);
    else stream_store<scalar_t>(e, token, column, e.out_columns(p.n), y);
  }
}

// Barrier of the warps that share rows of the weight.
template <typename Shape>
__device__ __forceinline__ void stream_sync(const StreamBlock<Shape>& b) {
  if (b.size > 1) cluster_sync(b.size);
  else if (blockDim.y > 1)
    asm volatile("bar.sync %0, %1;\n" ::"r"(threadIdx.z + 1), "r"(blockDim.y * kWarpSize) : "memory");
  else __syncwarp();
}

// The weight is the 16-row operand and tokens are the 8 columns. A lane has eight neighbours along k
// of weight rows g and g + 8, and of token g. The mma sums over k, so which k a fragment register
// stands for does not matter as long as both operands agree: the eight values serve two mma, the
// first taking values 0-3 and the second 4-7 of each lane.
template <typename Shape>
__device__ __forceinline__ void stream_multiply(
    float (&acc)[Shape::kSets][Shape::kRowTiles][Shape::kTokenTiles][4], const unsigned char* slot, int g,
    int t, const unsigned char* const (&x)[Shape::kTokenTiles], int k_offset) {
  uint4 w[2][Shape::kRowTiles * 2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < Shape::kRowTiles * 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        w[half][i][j] = *reinterpret_cast<const uint4*>(slot + half * (Shape::kSlotBytes / 2) + i * 1024 +
                                                        g * 128 + (((j ^ (g & 1)) * 4 + t) << 4));
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < Shape::kTokenTiles; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(x[i] + k_offset + half * 128 + j * 64);
        const uint32_t b0[2] = {v.x, v.y}, b1[2] = {v.z, v.w};
#pragma unroll
        for (int r = 0; r < Shape::kRowTiles; ++r) {
          const uint4 low = w[half][r * 2][j], high = w[half][r * 2 + 1][j];
          const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
          const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
          mma_m16n8k16<scalar_t>(acc[(j * 2) % Shape::kSets][r][i], a0, b0);
          mma_m16n8k16<scalar_t>(acc[(j * 2 + 1) % Shape::kSets][r][i], a1, b1);
        }
      }
}

// Blocks with blockIdx.y > 0 take the tokens that the ones before have no room for.
template <typename Shape>
__device__ __forceinline__ Problem stream_problem(Problem p) {
  const int token0 = blockIdx.y * Shape::kTokens;
  Epilogue& e = p.epilogue;
  const int size = e.is_float ? sizeof(float) : sizeof(scalar_t);
  p.x += token0 * p.x_stride;
  p.m = min(p.m - token0, Shape::kTokens);
  e.out = static_cast<char*>(e.out) + token0 * e.out_stride * size;
  if (e.residual != nullptr)
    e.residual = static_cast<const char*>(e.residual) + token0 * e.residual_stride * size;
  return p;
}

// `overlaps`: the kernel in front may still run (it was launched so). SAFETY: then what it writes
// must not be the weight.
template <typename Shape, bool kNorm>
__device__ __forceinline__ void stream(const Problem& whole, bool overlaps) {
  extern __shared__ __align__(128) unsigned char smem[];
  allow_next_kernel();
  const Problem p = stream_problem<Shape>(whole);
  const StreamBlock<Shape> b(p, smem);
  __shared__ BulkBarrier barrier;
  if (b.thread == 0) barrier.init();
  __syncthreads();
  StreamLoader<Shape> loader(p, b);
  // When the kernel in front may still run, the weights come first. Else x does: behind the weights
  // it would wait for all of them.
  if (!overlaps) stream_load_x(p, b, barrier);
#pragma unroll 1
  for (int i = 0; i < Shape::kSlots - 1; ++i) loader.load();
  if (overlaps) stream_load_x(p, b, barrier);
  __syncthreads();  // shows the zeros
  barrier.wait();
  if constexpr (kNorm) stream_norm(p, b);

  const int g = b.lane_idx / 4, t = b.lane_idx % 4;
  const unsigned char* x[Shape::kTokenTiles];
#pragma unroll
  for (int i = 0; i < Shape::kTokenTiles; ++i)  // tokens that do not exist: any, their sums are dropped
    x[i] = b.x + min(i * 8 + g, p.m - 1) * b.x_pitch + threadIdx.y * b.part_k * 2 + t * 16;

  int slot = 0, buffer = 0;
#pragma unroll 1
  for (int tile = b.tile; tile < b.num_tiles; tile += b.tile_step) {
    float acc[Shape::kSets][Shape::kRowTiles][Shape::kTokenTiles][4] = {};
#pragma unroll 1
    for (int k = b.k_begin; k < b.k_end; k += kStreamK) {
      cp_async_wait<Shape::kSlots - 2>();
      __syncwarp();   // SAFETY: shows the lanes each other's copies, and ends their reads of
      loader.load();  // the slot of the step before, which is filled again
      stream_multiply<Shape>(acc, b.ring + slot * Shape::kSlotBytes, g, t, x, (k - b.k_begin) * 2);
      slot = slot + 1 == Shape::kSlots ? 0 : slot + 1;
    }
    float* sums = b.sums + (buffer * b.num_warps + b.warp_idx) * Shape::kSumFloats;
#pragma unroll
    for (int r = 0; r < Shape::kRowTiles; ++r)
#pragma unroll
      for (int i = 0; i < Shape::kTokenTiles; ++i) {
        float sum[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[j] = acc[0][r][i][j];
#pragma unroll
          for (int set = 1; set < Shape::kSets; ++set) sum[j] += acc[set][r][i][j];
        }
        float* to = sums + (i * 8 + t * 2) * Shape::kPitch + r * 16 + g;
        to[0] = sum[0], to[Shape::kPitch] = sum[1], to[8] = sum[2], to[Shape::kPitch + 8] = sum[3];
      }
    // SAFETY: with two buffers, a warp writes one only after the barrier of the tile between, which
    // nobody passes who still reads it; with one, a second barrier says so.
    stream_sync(b);
    stream_finish(p, b, b.row0(tile), sums - threadIdx.y * Shape::kSumFloats);
    if constexpr (Shape::kBuffers == 1) stream_sync(b);
    else buffer ^= 1;
  }
  if (b.size > 1) cluster_sync(b.size);  // SAFETY: others may still read this block's memory.
}

#endif
