// Product with few rows of x (decoding) in 16-bit types: the weights are what costs, so they stream
// once, and x stays in shared memory.
//
// k is cut into parts of k_per_split. A warp takes 16 rows of the weight and one part of
// k; a block is threadIdx.y = warps along k times threadIdx.z = warps along rows, and a cluster
// of C blocks shares a tile, block r taking the parts r * blockDim.y and on. The parts' sums are
// added in their order, whoever made them: a row of out is bit for bit the same whatever m, the
// cluster and the block are, as long as k_per_split is.
//
// Every warp has a ring of its own in shared memory, filled by cp.async. So no warp ever waits for
// another one in the loop, the next tile's weights are on their way while a tile is finished, and
// the first are on their way before the kernel in front has ended (they do not depend on it).
#pragma once

#include "common/cluster.cuh"
#include "gemm/problem.cuh"
#include "common/mma.cuh"

#if ENGINE_DTYPE != 0

constexpr int kStreamK = 128;  // values of k a warp takes at a time: two 128-byte lines

template <int kTokenTiles_, int kSlots_, int kBuffers_>
struct StreamShape {
  static constexpr int kTokenTiles = kTokenTiles_;
  static constexpr int kTokens = kTokenTiles * 8, kRows = 16;  // of a warp
  static constexpr int kSlots = kSlots_, kBuffers = kBuffers_;
  static constexpr int kLoads = 8;  // 16-byte loads a lane makes for a slot
  // Of sums: an mma waits for the one before.
  static constexpr int kSets = kTokenTiles <= 2 ? 4 : 1;
  static constexpr int kSlotBytes = kLoads * kWarpSize * 16;
  static constexpr int kPitch = kRows + 4;  // 2 * kPitch is 8 mod 32: sums meet no bank twice
  static constexpr int kSumFloats = kTokens * kPitch;  // of a warp
};

// How the host has cut the problem: there is no division on the way to the first product.
struct StreamCut {
  int num_tiles;  // of blockDim.z * 16 rows of the weight
  int slots;      // of a warp's ring: all its steps, if these are fewer than the shape has
  int num_gates;  // rows of gate, if the weight has first all of these, then all of up; or 0
  bool warms_up;  // whether a block with weights in registers goes through its work once before
};

// Where this block stands, and its shared memory.
template <typename Shape>
struct StreamBlock {
  int lane_idx, warp_idx, num_warps, threads, thread;
  int size, rank;  // of the cluster
  int tile, tile_step, num_tiles;
  int parts;                   // of k altogether
  int part_k, k_begin, k_end;  // of this warp
  int slice_begin, slice_end;  // of this block
  int num_gates;
  int x_pitch;  // bytes from a row of x to the next: 64 mod 128, so that no bank meets twice
  unsigned char* ring;  // of this warp
  unsigned char* x;     // [token][slice of k]
  float* sums;          // [buffer][warp][token][row]

  __device__ __forceinline__ StreamBlock(const Problem& p, const StreamCut& cut,
                                         unsigned char* smem) {
    lane_idx = threadIdx.x;
    warp_idx = threadIdx.z * blockDim.y + threadIdx.y;
    num_warps = blockDim.y * blockDim.z;
    threads = num_warps * kWarpSize;
    thread = warp_idx * kWarpSize + lane_idx;
    size = cluster_size();
    rank = cluster_rank();
    tile = cluster_index();
    tile_step = num_clusters();
    num_tiles = cut.num_tiles;
    num_gates = cut.num_gates;
    parts = size * blockDim.y;
    part_k = p.k_per_split;
    k_begin =
        min(p.k, (rank * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y)) * part_k);
    k_end = min(p.k, k_begin + part_k);
    slice_begin = min(p.k, rank * static_cast<int>(blockDim.y) * part_k);
    slice_end = min(p.k, slice_begin + static_cast<int>(blockDim.y) * part_k);
    x_pitch = static_cast<int>(blockDim.y) * part_k * 2 + 64;
    ring = smem + warp_idx * (cut.slots * Shape::kSlotBytes);
    x = smem + num_warps * (cut.slots * Shape::kSlotBytes);
    sums = reinterpret_cast<float*>(x + p.m * x_pitch);
  }

  __device__ __forceinline__ int row0(int tile) const {
    return (tile * static_cast<int>(blockDim.z) + static_cast<int>(threadIdx.z)) * Shape::kRows;
  }
  __device__ __forceinline__ scalar_t* x_row(int row) const {
    return reinterpret_cast<scalar_t*>(x + row * x_pitch);
  }
};

// A slot of the ring is two halves of 64 values of k, each with rows of 128 bytes in eight chunks;
// in odd rows the chunks 0-3 and 4-7 change places, so that a read of eight lanes meets no bank
// twice. A warp's copy instruction covers four whole lines: what the L1's tag lookup, one line a
// clock, makes of twice as many half lines takes twice as long.

// The weights a warp reads, in the order it reads them, a slot of the ring at a time. Where gates
// and ups lie apart, the first eight of the 16 rows are gates and the others the ups that belong to
// them.
template <typename Shape>
struct StreamLoader {
  const Problem& p;
  const StreamBlock<Shape>& b;
  const scalar_t* from;
  int64_t row_step, half_step;  // four rows on, and from the first eight rows to the others
  int tile, k, rows_left, slot;
  uint32_t to;

  __device__ __forceinline__ StreamLoader(const Problem& p_, const StreamBlock<Shape>& b_)
      : p(p_), b(b_), row_step(static_cast<int64_t>(p_.k) * 4), tile(b_.tile), slot(0) {
    half_step = b.num_gates > 0 ? static_cast<int64_t>(p.k) * b.num_gates : row_step * 2;
    const int row = b.lane_idx / 8, chunk = b.lane_idx % 8;
    to = row * 128 + ((chunk ^ ((row & 1) << 2)) << 4);
    start_tile();
  }

  __device__ __forceinline__ void start_tile() {
    const int row0 = b.row0(tile), row = b.lane_idx / 8;
    k = b.k_begin + (b.lane_idx % 8) * kVec;
    rows_left = p.n - row0 - row;
    from = p.weight + static_cast<int64_t>((b.num_gates > 0 ? row0 / 2 : row0) + row) * p.k + k;
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
        for (int i = 0; i < 4; ++i) {
          const bool valid = has_k && i * 4 < rows_left;
          const scalar_t* row = source + i / 2 * half_step + i % 2 * row_step;
          cp_async_16(smem + half * (Shape::kSlotBytes / 2) + i * 512, valid ? row : p.weight,
                      valid);
        }
      }
      k += kStreamK, from += kStreamK;
      if (k - (b.lane_idx % 8) * kVec >= b.k_end) tile += b.tile_step, start_tile();
    }
    cp_async_commit();
    slot = slot + 1 == Shape::kSlots ? 0 : slot + 1;
  }
};

// ---- x ---------------------------------------------------------------------------------------

// A row's squares are added in chunks, each by one warp: 256 values of k, or as many times that as
// leaves kSquareChunks of them. So neither the block nor m changes a norm's bits.
constexpr int kSquareChunks = 16;

struct StreamSquares {
  __align__(16) float of[kSquareChunks];

  __device__ __forceinline__ float sum() const {
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(of + i * 4);
      s[i] = (v.x + v.y) + (v.z + v.w);
    }
    return (s[0] + s[1]) + (s[2] + s[3]);
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

// 16 bytes that are read where the next read finds what others have written since.
__device__ __forceinline__ Vec<scalar_t, kVec> load_from_l2(const scalar_t* from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return *reinterpret_cast<Vec<scalar_t, kVec>*>(&v);
}

// Zeros behind the block's slice of x, up to whole steps along k. A barrier must follow.
template <typename Shape>
__device__ __forceinline__ void stream_pad_x(const Problem& p, const StreamBlock<Shape>& b) {
  const int count = b.slice_end - b.slice_begin;
  const int pad = ((count + kStreamK - 1) / kStreamK * kStreamK - count) / kVec;
  if (b.thread < pad)
    for (int row = 0; row < p.m; ++row)
      store_vec(b.x_row(row) + count + b.thread * kVec, Vec<scalar_t, kVec>{});
}

// One row of x, which goes from L2 to shared memory through registers: sooner there than a bulk
// copy, and the norm meets it on the way.
template <typename Shape, bool kNorm>
struct StreamRow {
  using V = Vec<scalar_t, kVec>;
  static constexpr int kHeld = 4;  // pieces of it in a thread
  V x[kHeld], w[kNorm ? kHeld : 1];

  __device__ __forceinline__ static bool fits(const Problem& p, const StreamBlock<Shape>& b) {
    const bool is_whole = !kNorm || (b.size == 1 && p.k <= kSquareChunks * kWarpSize * kVec);
    return p.m == 1 && is_whole && b.slice_end - b.slice_begin <= b.threads * kVec * kHeld;
  }

  __device__ __forceinline__ static void load(V (&to)[kHeld], const scalar_t* from,
                                              const StreamBlock<Shape>& b) {
    const int vectors = (b.slice_end - b.slice_begin) / kVec;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      to[j] = V{};
      const int i = b.thread + j * b.threads;
      if (i < vectors) to[j] = load_from_l2(from + b.slice_begin + i * kVec);
    }
  }

  __device__ __forceinline__ void load_norm(const Problem& p, const StreamBlock<Shape>& b) {
    if constexpr (kNorm) load(w, p.norm.weight, b);
  }
  __device__ __forceinline__ void load_x(const Problem& p, const StreamBlock<Shape>& b) {
    load(x, p.x, b);
  }

  // Ends with a barrier of the block.
  __device__ __forceinline__ void store(const Problem& p, const StreamBlock<Shape>& b,
                                        StreamSquares& squares) {
    const int vectors = (b.slice_end - b.slice_begin) / kVec;
    if constexpr (kNorm) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int chunk = b.warp_idx + j * b.num_warps;
        if (chunk * kWarpSize >= vectors) break;
        const float sum = warp_sum(sum_of_squares(x[j], 0.0f));
        if (b.lane_idx == 0) squares.of[chunk] = sum;
      }
      __syncthreads();
      const float scale = squares.scale(p);
#pragma unroll
      for (int j = 0; j < kHeld; ++j)
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[j].v[i] = p.norm.apply(x[j].v[i], scale, w[j].v[i]);
    }
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int i = b.thread + j * b.threads;
      if (i < vectors) store_vec(b.x_row(0) + i * kVec, x[j]);
    }
    __syncthreads();
  }
};

// Begins to bring the block's slice of x's rows into shared memory. The barrier counts the bytes.
template <typename Shape>
__device__ __forceinline__ void stream_load_x(const Problem& p, const StreamBlock<Shape>& b,
                                              BulkBarrier& barrier) {
  const int count = b.slice_end - b.slice_begin;
  const scalar_t* from = p.x + b.slice_begin;
#if ENGINE_HAS_CLUSTERS
  if (b.warp_idx == 0) {
    if (b.lane_idx == 0) barrier.expect(p.m * count * 2);
    __syncwarp();
    if (count > 0)
      for (int row = b.lane_idx; row < p.m; row += kWarpSize)
        barrier.copy(b.x_row(row), from + row * p.x_stride, count * 2);
  }
#else
  const int vectors = count / kVec;
#pragma unroll 1
  for (int row = 0; row < p.m; ++row)
#pragma unroll 4
    for (int i = b.thread; i < vectors; i += b.threads)
      store_vec(b.x_row(row) + i * kVec,
                load_vec<scalar_t, kVec>(from + row * p.x_stride + i * kVec));
#endif
}

// Normalises x in shared memory, where it is still on its way: the squares are those of the whole
// rows, from L2. Ends with a barrier of the block.
template <typename Shape>
__device__ __forceinline__ void stream_norm(const Problem& p, const StreamBlock<Shape>& b,
                                            BulkBarrier& barrier, StreamSquares* squares) {
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

// ---- results ---------------------------------------------------------------------------------

// What four columns of a row of out need beside the sums. Asked for early, nobody waits for it.
struct StreamOperands {
  Vec<float, 4> bias, up_bias, residual;
};

// The columns that a thread writes: four of a row of out, in turn.
template <typename Shape>
struct StreamPlace {
  int index, step, token, row, column;  // row of the tile's 16; column of out

  __device__ __forceinline__ StreamPlace(const Problem& p, const StreamBlock<Shape>& b)
      : index((b.rank * static_cast<int>(blockDim.y) + threadIdx.y) * kWarpSize + b.lane_idx),
        step(b.parts * kWarpSize) {  // the warps that share these rows
  }
  // Whether there is one in the tile that begins with this row of the weight.
  __device__ __forceinline__ bool is_inside(const Problem& p, int row0) {
    const bool is_gated = p.epilogue.is_gated();
    token = index >> (is_gated ? 1 : 2);
    row = is_gated ? index % 2 * 4 : index % 4 * 4;
    column = is_gated ? row0 / 2 + row : row0 + row;
    return token < p.m && row0 + row < p.n;
  }
};

// The bias may be read before the kernel in front has ended.
template <typename Shape>
__device__ __forceinline__ void stream_load_bias(const Problem& p, const StreamBlock<Shape>& b,
                                                 const StreamPlace<Shape>& place,
                                                 StreamOperands& o) {
  const Epilogue& e = p.epilogue;
  o.bias = o.up_bias = Vec<float, 4>{};
  if (e.bias == nullptr) return;
  const int gate =
      e.is_gated() && b.num_gates == 0 ? place.column / 8 * 16 + place.column % 8 : place.column;
  const int up = b.num_gates > 0 ? gate + b.num_gates : gate + 8;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (e.is_gated() || gate + j < p.n) o.bias.v[j] = to_float(e.bias[gate + j]);
    if (e.is_gated()) o.up_bias.v[j] = to_float(e.bias[up + j]);
  }
}

template <typename Out, typename Shape>
__device__ __forceinline__ void stream_load_residual_as(const Problem& p,
                                                        const StreamPlace<Shape>& place,
                                                        StreamOperands& o) {
  const Epilogue& e = p.epilogue;
  const Vec<Out, 4> r = e.load_residual<Out>(place.token, place.column, e.out_columns(p.n));
#pragma unroll
  for (int j = 0; j < 4; ++j) o.residual.v[j] = to_float(r.v[j]);
}

template <typename Shape>
__device__ __forceinline__ void stream_load_residual(const Problem& p,
                                                     const StreamPlace<Shape>& place,
                                                     StreamOperands& o) {
  if (p.epilogue.residual == nullptr) return;
  if (p.epilogue.is_float)
    stream_load_residual_as<float>(p, place, o);
  else
    stream_load_residual_as<scalar_t>(p, place, o);
}

template <typename Out>
__device__ __forceinline__ void stream_store(const Epilogue& e, int token, int column, int n,
                                             const Vec<float, 4>& sum) {
  Vec<Out, 4> y;
#pragma unroll
  for (int j = 0; j < 4; ++j) y.v[j] = from_float<Out>(sum.v[j]);
  e.store<Out>(token, column, n, y);
}

// The sum of four rows of the weight over all parts, in their order; `from` is the first part's.
template <typename Shape>
__device__ __forceinline__ Vec<float, 4> stream_sum(const StreamBlock<Shape>& b,
                                                    const float* from) {
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

// Adds the parts' sums of the rows that this warp shares with others, in the order of the parts,
// and writes this warp's share of them to out. `sums` are those of the block's first warp of these
// rows; `early` are the operands of the first place in the first tile.
template <typename Shape>
__device__ __forceinline__ void stream_finish(const Problem& p, const StreamBlock<Shape>& b,
                                              int row0, const float* sums,
                                              const StreamOperands& early, bool is_first) {
  const Epilogue& e = p.epilogue;
#pragma unroll 1
  for (StreamPlace<Shape> place(p, b); place.is_inside(p, row0);
       place.index += place.step, is_first = false) {
    StreamOperands o = early;
    if (!is_first) {
      stream_load_bias(p, b, place, o);
      stream_load_residual(p, place, o);
    }
    const float* from = sums + place.token * Shape::kPitch + place.row;
    Vec<float, 4> y = stream_sum(b, from);
    if (e.is_gated()) {
      const Vec<float, 4> up = stream_sum(b, from + 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[j] = silu(y.v[j] + o.bias.v[j]) * (up.v[j] + o.up_bias.v[j]);
    } else if (!e.is_bare()) {
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[j] = activate(e.activation, y.v[j] + o.bias.v[j]);
    }
    if (e.residual != nullptr) {  // -0 + 0 would lose the sign
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[j] += o.residual.v[j];
    }
    const int n = e.out_columns(p.n);
    if (e.is_float)
      stream_store<float>(e, place.token, place.column, n, y);
    else
      stream_store<scalar_t>(e, place.token, place.column, n, y);
  }
}

// Barrier of the warps that share rows of the weight.
template <typename Shape>
__device__ __forceinline__ void stream_sync(const StreamBlock<Shape>& b) {
  if (b.size > 1)
    cluster_sync(b.size);
  else if (blockDim.y > 1)
    asm volatile("bar.sync %0, %1;\n" ::"r"(threadIdx.z + 1), "r"(blockDim.y * kWarpSize)
                 : "memory");
  else
    __syncwarp();
}

// Where a lane finds the tokens that it multiplies: zeros for those that do not exist.
template <typename Shape>
struct StreamTokens {
  const unsigned char* row;  // of the first
  int pitch, count;  // of eight rows; tokens from the first on, this lane's among them if > 0

  __device__ __forceinline__ StreamTokens(const Problem& p, const StreamBlock<Shape>& b, int g,
                                          int t)
      : row(b.x + g * b.x_pitch + threadIdx.y * b.part_k * 2 + t * 16),
        pitch(8 * b.x_pitch),
        count(p.m - g) {}
  __device__ __forceinline__ uint4 load(int i, int offset) const {
    uint4 v = {};
    if (count > i * 8) v = *reinterpret_cast<const uint4*>(row + i * pitch + offset);
    return v;
  }
};

// 16 rows of the weight by kStreamK values of k, as a warp multiplies them: [half][rows / 8][j].
struct StreamWeights {
  uint4 of[2][2][2];
};

template <typename Shape>
__device__ __forceinline__ void stream_multiply_held(
    float (&acc)[Shape::kSets][Shape::kTokenTiles][4], const StreamWeights& w,
    const StreamTokens<Shape>& x, int k_offset) {
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

// The weight is the 16-row operand and tokens are the 8 columns. A lane has eight neighbours along
// k of weight rows g and g + 8, and of token g. The mma sums over k, so which k a fragment register
// stands for does not matter as long as both operands agree: the eight values serve two mma, the
// first taking values 0-3 and the second 4-7 of each lane.
template <typename Shape>
__device__ __forceinline__ void stream_multiply(float (&acc)[Shape::kSets][Shape::kTokenTiles][4],
                                                const unsigned char* slot, int g, int t,
                                                const StreamTokens<Shape>& x, int k_offset) {
  StreamWeights w;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        w.of[half][i][j] =
            *reinterpret_cast<const uint4*>(slot + half * (Shape::kSlotBytes / 2) + i * 1024 +
                                            g * 128 + (((j ^ (g & 1)) * 4 + t) << 4));
  stream_multiply_held<Shape>(acc, w, x, k_offset);
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

// Adds the sets of a warp's sums and shows them to the warps that share its rows.
template <typename Shape>
__device__ __forceinline__ void stream_store_sums(
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

// What a block has of its own in shared memory, and brings before its weights.
template <typename Shape, bool kNorm>
struct StreamFront {
  StreamRow<Shape, kNorm> row;
  bool is_row, has_place;
  StreamPlace<Shape> place;
  StreamOperands early;

  __device__ __forceinline__ StreamFront(const Problem& p, const StreamBlock<Shape>& b,
                                         BulkBarrier& barrier, StreamSquares* squares)
      : is_row(row.fits(p, b)), place(p, b), early{} {
    has_place = place.is_inside(p, b.row0(b.tile));
    if (b.thread == 0) barrier.init();
    if constexpr (kNorm)  // chunks that a row does not have are zeros
      for (int i = b.thread; i < Shape::kTokens * kSquareChunks; i += b.threads)
        squares[0].of[i] = 0.0f;
    if (is_row) row.load_norm(p, b);
    if (has_place) stream_load_bias(p, b, place, early);
    stream_pad_x(p, b);
    __syncthreads();
  }

  __device__ __forceinline__ void load_x(const Problem& p, const StreamBlock<Shape>& b,
                                         BulkBarrier& barrier) {
    if (is_row)
      row.load_x(p, b);
    else
      stream_load_x(p, b, barrier);
    if (has_place) stream_load_residual(p, place, early);
  }

  // Ends when x is there for all warps.
  __device__ __forceinline__ void finish_x(const Problem& p, const StreamBlock<Shape>& b,
                                           BulkBarrier& barrier, StreamSquares* squares) {
    if (is_row) {
      row.store(p, b, squares[0]);
    } else if constexpr (kNorm) {
      stream_norm(p, b, barrier, squares);
    } else {
      barrier.wait();
      if constexpr (!ENGINE_HAS_CLUSTERS) __syncthreads();
    }
  }
};

// `uses_pdl`: the kernel in front may still run (it was launched so). SAFETY: then what it writes
// must not be the weight, the norm's weight or the bias.
template <typename Shape, bool kNorm>
__device__ __forceinline__ void stream(const Problem& whole, const StreamCut& cut, bool uses_pdl) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ BulkBarrier barrier;
  __shared__ StreamSquares smem_squares[kNorm ? Shape::kTokens : 1];
  pdl_trigger();
  const Problem p = stream_problem<Shape>(whole);
  const StreamBlock<Shape> b(p, cut, smem);
  StreamLoader<Shape> loader(p, b);
  StreamFront<Shape, kNorm> front(p, b, barrier, smem_squares);
  // When the kernel in front may still run, the weights come first. Else x does: behind the weights
  // it would wait for all of them.
  if (uses_pdl) {
#pragma unroll 1
    for (int i = 0; i < Shape::kSlots - 1; ++i) loader.load();
  }
  pdl_wait();
  front.load_x(p, b, barrier);
  if (!uses_pdl) {
#pragma unroll 1
    for (int i = 0; i < Shape::kSlots - 1; ++i) loader.load();
  }
  front.finish_x(p, b, barrier, smem_squares);

  const int g = b.lane_idx / 4, t = b.lane_idx % 4;
  const StreamTokens<Shape> x(p, b, g, t);
  int slot = 0, buffer = 0;
#pragma unroll 1
  for (int tile = b.tile; tile < b.num_tiles; tile += b.tile_step) {
    float acc[Shape::kSets][Shape::kTokenTiles][4] = {};
#pragma unroll 1
    for (int k = b.k_begin; k < b.k_end; k += kStreamK) {
      cp_async_wait<Shape::kSlots - 2>();
      __syncwarp();   // SAFETY: shows the lanes each other's copies, and ends their reads of
      loader.load();  // the slot of the step before, which is filled again
      stream_multiply<Shape>(acc, b.ring + slot * Shape::kSlotBytes, g, t, x, (k - b.k_begin) * 2);
      slot = slot + 1 == Shape::kSlots ? 0 : slot + 1;
    }
    float* sums = b.sums + (buffer * b.num_warps + b.warp_idx) * Shape::kSumFloats;
    stream_store_sums<Shape>(acc, sums, g, t);
    // SAFETY: with two buffers, a warp writes one only after the barrier of the tile between, which
    // nobody passes who still reads it; with one, a second barrier says so.
    stream_sync(b);
    stream_finish(p, b, b.row0(tile), sums - threadIdx.y * Shape::kSumFloats, front.early,
                  tile == b.tile);
    if constexpr (Shape::kBuffers == 1)
      stream_sync(b);
    else
      buffer ^= 1;
  }
  if (b.size > 1) cluster_sync(b.size);  // SAFETY: others may still read this block's memory.
}

// ---- weights in registers --------------------------------------------------------------------

// One row of x, and weights that the registers hold: a warp has kHeldSteps steps along k of 16
// rows, and there is a block for every tile. All weights are there when the kernel in front ends,
// and what is left to do after that is short: shared memory, with its 128 bytes a clock, need not
// be read for them. The sums are those of the streams with parts of the same length, bit for bit.
constexpr int kHeldSteps = 2;
struct HeldWeights {
  StreamWeights step[kHeldSteps];

  __device__ __forceinline__ HeldWeights(const scalar_t* low, const scalar_t* high, int k_left,
                                         bool has_low, bool has_high) {
#pragma unroll
    for (int s = 0; s < kHeldSteps; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int k = s * kStreamK + half * 64 + j * 32;
            uint4 v = {};
            if ((i == 0 ? has_low : has_high) && k < k_left)
              v = load_early((i == 0 ? low : high) + k);
            step[s].of[half][i][j] = v;
          }
  }

  // Volatile: asked for here, and not where it is used.
  __device__ __forceinline__ static uint4 load_early(const scalar_t* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
  }
};

// A column of out, whose sum this thread finishes: one lane has one.
struct HeldColumn {
  bool exists;
  int column;
  float bias, up_bias, residual;

  template <typename Shape>
  __device__ __forceinline__ HeldColumn(const Problem& p, const StreamBlock<Shape>& b, int row0) {
    const Epilogue& e = p.epilogue;
    const int lane = b.lane_idx;
    column = (e.is_gated() ? row0 / 2 : row0) + lane;
    exists = b.rank == 0 && threadIdx.y == 0 && lane < (e.is_gated() ? 8 : 16) && row0 + lane < p.n;
    bias = up_bias = residual = 0.0f;
    if (!exists || e.bias == nullptr) return;
    const int gate = e.is_gated() && b.num_gates == 0 ? row0 + lane : column;
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
      y = silu(sum + bias) * (up + up_bias);
    else if (!e.is_bare())
      y = activate(e.activation, sum + bias);
    if (e.residual != nullptr) y += residual;  // -0 + 0 would lose the sign
    if (e.is_float)
      static_cast<float*>(e.out)[column] = y;
    else
      static_cast<scalar_t*>(e.out)[column] = from_float<scalar_t>(y);
  }
};

// The sum over all parts of row `row` of this warp's 16, in their order.
template <typename Shape>
__device__ __forceinline__ float held_sum(const StreamBlock<Shape>& b, int row) {
  const float* from = b.sums + threadIdx.z * (blockDim.y * 16) + row;
  float sum = 0.0f;
#pragma unroll 1
  for (int rank = 0; rank < b.size; ++rank)
#pragma unroll 4
    for (int part = 0; part < static_cast<int>(blockDim.y); ++part)
      sum += load_cluster_float(from + part * 16, rank, b.size);
  return sum;
}

// The row of x on its way from L2 to shared memory, a few pieces of it in each thread. The norm's
// weight waits in shared memory, at the same places: registers are for weights.
template <typename Shape, bool kNorm>
struct HeldRow {
  using V = Vec<scalar_t, kVec>;
  static constexpr int kPieces = 2;
  scalar_t *to, *norm;
  int vectors;
  V v[kPieces];

  __device__ __forceinline__ HeldRow(const Problem& p, const StreamBlock<Shape>& b)
      : to(b.x_row(0)),
        norm(reinterpret_cast<scalar_t*>(b.sums + b.num_warps * 16)),
        vectors((b.slice_end - b.slice_begin) / kVec) {}
  __device__ __forceinline__ void load(const scalar_t* from, const StreamBlock<Shape>& b) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int i = b.thread + j * b.threads;
      v[j] = V{};
      if (i < vectors) v[j] = load_from_l2(from + b.slice_begin + i * kVec);
    }
  }
  __device__ __forceinline__ void store(scalar_t* smem, const StreamBlock<Shape>& b) const {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int i = b.thread + j * b.threads;
      if (i < vectors) store_vec(smem + i * kVec, v[j]);
    }
  }
  // Zeros behind its end, where weights are zeros too.
  __device__ __forceinline__ void pad(const StreamBlock<Shape>& b) const {
    const int all = static_cast<int>(blockDim.y) * b.part_k / kVec;
    for (int i = vectors + b.thread; i < all; i += b.threads) store_vec(to + i * kVec, V{});
  }
  // Ends with a barrier of the block.
  __device__ __forceinline__ void finish(const Problem& p, const StreamBlock<Shape>& b,
                                         StreamSquares& squares) {
    if constexpr (kNorm) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int chunk = b.warp_idx + j * b.num_warps;
        if (chunk * kWarpSize >= vectors) break;
        const float sum = warp_sum(sum_of_squares(v[j], 0.0f));
        if (b.lane_idx == 0) squares.of[chunk] = sum;
      }
      __syncthreads();
      const float scale = squares.scale(p);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int i = b.thread + j * b.threads;
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

// `uses_pdl` says nothing here: x comes behind the weights in any case.
template <bool kNorm>
__device__ __forceinline__ void stream_held(const Problem& p, const StreamCut& cut, bool) {
  using Shape = StreamShape<1, 1, 1>;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ StreamSquares smem_squares;
  pdl_trigger();
  const StreamBlock<Shape> b(p, cut, smem);
  const int g = b.lane_idx / 4, t = b.lane_idx % 4, row0 = b.row0(b.tile);
  if constexpr (kNorm)  // chunks that a row does not have are zeros
    if (b.thread < kSquareChunks) smem_squares.of[b.thread] = 0.0f;
  HeldRow<Shape, kNorm> row(p, b);
  if constexpr (kNorm) row.load(p.norm.weight, b);
  HeldColumn column(p, b, row0);
  const bool is_split = b.num_gates > 0;
  const scalar_t* low = p.weight + static_cast<int64_t>((is_split ? row0 / 2 : row0) + g) * p.k +
                        b.k_begin + t * kVec;
  const scalar_t* high = low + static_cast<int64_t>(is_split ? b.num_gates : 8) * p.k;
  const HeldWeights weights(low, high, b.k_end - b.k_begin - t * kVec, row0 + g < p.n,
                            row0 + 8 + g < p.n);
  if constexpr (kNorm) row.store(row.norm, b);
  row.pad(b);
  __syncthreads();
  float* sums = b.sums + b.warp_idx * 16;
  const StreamTokens<Shape> x(p, b, g, t);
  // Before the kernel in front has ended there is time for a warm-up pass, of which nothing is kept:
  // afterwards the instructions, and where x is, need not be looked up in slower memory.
#pragma unroll 1
  for (int pass = cut.warms_up ? 0 : 1; pass < 2; ++pass) {
    if (pass == 1) {
      pdl_wait();
      column.load_residual(p.epilogue);
    }
    row.load(p.x, b);
    row.finish(p, b, smem_squares);
    float acc[Shape::kSets][1][4] = {};
#pragma unroll
    for (int s = 0; s < kHeldSteps; ++s)
      stream_multiply_held<Shape>(acc, weights.step[s], x, s * kStreamK * 2);
    if (t == 0) {
      sums[g] = ((acc[0][0][0] + acc[1][0][0]) + acc[2][0][0]) + acc[3][0][0];
      sums[g + 8] = ((acc[0][0][2] + acc[1][0][2]) + acc[2][0][2]) + acc[3][0][2];
    }
    cluster_sync(b.size);
    if (column.exists) {
      const float sum = held_sum(b, b.lane_idx);
      const float up = p.epilogue.is_gated() ? held_sum(b, b.lane_idx + 8) : 0.0f;
      if (pass == 1) column.store(p.epilogue, sum, up);
    }
  }
  if (b.size > 1) cluster_sync(b.size);  // SAFETY: others may still read this block's memory.
}

#endif
