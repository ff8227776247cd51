// The parts of gemm_sm90.cu: tiles and their order, the ring of stages, loads and products.
#pragma once

#include "gemm/problem.cuh"
#include "common/sm90.cuh"
#include "common/wgmma.cuh"

constexpr int kBlockK = 64;    // of k: 128 bytes a row, the widest swizzle
constexpr int kDepth = DEPTH;  // such blocks in a stage
constexpr int kStageK = kDepth * kBlockK;
// Warpgroups that multiply share a tile's rows, or its columns where three would have too few
// registers each.
constexpr bool kSharesColumns = TILE_M == 192 && TILE_N > 192;
constexpr int kWarpgroups = TILE_M == 64 ? 1 : TILE_M == 192 && !kSharesColumns ? 3 : 2;
constexpr int kBlocksM = TILE_M / 64 / (kSharesColumns ? 1 : kWarpgroups);  // of 64 rows, of each
constexpr int kWarpgroupCols = TILE_N / (kSharesColumns ? kWarpgroups : 1);
constexpr bool kMayGate = kWarpgroups != 3;  // three have no registers for it
constexpr int kConsumers = kWarpgroups * 128;
// One warp loads. Before warpgroups that take registers from each other it must be a warpgroup too.
constexpr bool kMovesRegisters = kWarpgroups > 1;
constexpr int kThreads = kConsumers + (kMovesRegisters ? 128 : 32);
constexpr int kFirstConsumer = kMovesRegisters ? 128 : 0;
constexpr int kProducer = kMovesRegisters ? 0 : kConsumers;
constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : kSharesColumns ? 24 : 40;
constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kSharesColumns ? 240 : 232;
static_assert(TILE_M % 64 == 0 && TILE_N % 16 == 0 && kWarpgroupCols % 16 == 0, "no such tile");

constexpr int kClusterM = CLUSTER_M, kClusterN = CLUSTER_N, kClusterK = CLUSTER_K;
constexpr int kClusterSize = kClusterM * kClusterN * kClusterK;
static_assert(TILE_M % (8 * kClusterN) == 0 && TILE_N % (8 * kClusterM) == 0, "atoms are 8 rows");

constexpr bool kWarmsUp = TILE_M * TILE_N <= 128 * 128;  // larger tiles have more to do than begin

// A block whose copies go to itself alone asks for them as soon as its own mbarriers are ready.
constexpr bool kLoadsAlone = kClusterM * kClusterN == 1;

constexpr int kRowBytes90 = 128;
constexpr int kBytesX = TILE_M * kRowBytes90, kBytesW = TILE_N * kRowBytes90;  // of a block of k
constexpr int kStageW = kDepth * kBytesW;
constexpr int kWarpStaging = 16 * 128;      // a warp's 16 rows on their way to global memory
constexpr bool kStores = STORES;            // results by TMA, while the next tile is multiplied
constexpr int kStagings = kStores ? 2 : 1;  // of a warp: one is filled while the other is read
constexpr int kBytesStaging = kConsumers / 32 * kStagings * kWarpStaging;
constexpr int kSlice = TILE_N / kClusterK;  // columns that a block finishes of a tile it shares
constexpr int kBytesSums = (kClusterK - 1) * TILE_M * kSlice * 4;  // from the cluster's others
static_assert(kClusterK == 1 || (kBlocksM == 1 && kSlice % 8 == 0), "no such share of a tile");
static_assert(kClusterK == 1 || kClusterM == 1, "a block of such a cluster could have no rows");

// The swizzle's atoms of 1024 bytes must be aligned; every block of a cluster moves by as much.
__device__ __forceinline__ unsigned char* align_smem(unsigned char* p) {
  return p + (-smem_address(p) & 1023);
}

// ---- the order of tiles ----------------------------------------------------------------------

// A cluster makes CLUSTER_M x CLUSTER_N tiles at a time. Clusters go down `group` rows of such
// super-tiles before they go right: what runs at one time reads few rows of x and of weight.
struct Schedule {
  int m, n, group, rows, cols;  // rows and cols of super-tiles
  int rank_m, rank_n, rank_k;   // of this block in its cluster
  int first_k, last_k;          // stages of k that this block sums

  __device__ __forceinline__ Schedule(int m_, int n_, int k, int group_)
      : m(m_),
        n(n_),
        group(group_),
        rows((m_ + TILE_M * kClusterM - 1) / (TILE_M * kClusterM)),
        cols((n_ + TILE_N * kClusterN - 1) / (TILE_N * kClusterN)) {
    const int rank = kClusterSize > 1 ? static_cast<int>(cluster_rank()) : 0;
    rank_m = rank % kClusterM;
    rank_n = rank / kClusterM % kClusterN;
    rank_k = rank / (kClusterM * kClusterN);
    const int stages_k = (k + kStageK - 1) / kStageK;
    first_k = stages_k * rank_k / kClusterK;
    last_k = stages_k * (rank_k + 1) / kClusterK;
  }

  __device__ __forceinline__ int first() const { return blockIdx.x / kClusterSize; }
  __device__ __forceinline__ int step() const { return gridDim.x / kClusterSize; }
  __device__ __forceinline__ int count() const { return rows * cols; }

  // The first row and column of this block's tile of the super-tile.
  __device__ __forceinline__ int2 tile(int index) const {
    if (rows == 1) return {rank_m * TILE_M, (index * kClusterN + rank_n) * TILE_N};
    const int band = index / (group * cols), within = index - band * group * cols;
    const int height = min(group, rows - band * group);
    const int row = band * group + within % height, col = within / height;
    return {(row * kClusterM + rank_m) * TILE_M, (col * kClusterN + rank_n) * TILE_N};
  }
};

// ---- the ring of stages ----------------------------------------------------------------------

struct Ring {
  int stage = 0;
  unsigned phase = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Shared memory: stages of x, stages of weight, staging of results, sums of other blocks, mbarriers;
// `idle` is one on which nobody arrives.
// With tiles of 64 rows the launch says how many stages there are, and of how many rows of x.
struct Pipeline {
  int stages, block_x, stage_x;  // bytes of a block of k of x, of a stage of x
  unsigned x, w, staging, sums, full, empty, sums_barrier, idle;

  __device__ __forceinline__ Pipeline(unsigned smem, int stages_, int x_rows) {
    stages = TILE_M == 64 ? stages_ : STAGES;
    block_x = TILE_M == 64 ? x_rows * kRowBytes90 : kBytesX;
    stage_x = kDepth * block_x;
    x = smem;
    w = x + stages * stage_x;
    staging = w + stages * kStageW;
    sums = staging + kBytesStaging;
    full = sums + kBytesSums;
    empty = full + stages * 8;
    sums_barrier = empty + stages * 8;
    idle = sums_barrier + 8;
  }

  // A stage is full when its bytes are there, and empty when every warpgroup that reads what this
  // block loads has let go of it: those of this block's row and column of the cluster.
  // `sums_rows`: of the tile, rounded to whole warps' 16, for which other blocks send sums.
  __device__ __forceinline__ void init(int sums_rows) const {
    for (int i = 0; i < stages; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, kWarpgroups * (kClusterM + kClusterN - 1));
    }
    mbarrier_init(idle, 1);
    if constexpr (kClusterK > 1) {
      mbarrier_init(sums_barrier, 1);
      mbarrier_arrive_expect_tx(sums_barrier, (kClusterK - 1) * sums_rows * kSlice * 4);
    }
    mbarrier_init_fence();
  }
};

// ---- producer --------------------------------------------------------------------------------

// What a launch leaves open about loading.
struct Loading {
  int x_part;     // rows of x that a block loads of a tile: TILE_M / CLUSTER_N, or fewer
  int tail_part;  // the same of the last rows' tile, which may have fewer
  bool uses_pdl;  // the weight may be read while the kernel in front still runs
  bool is_split;  // all rows of gate lie before those of up: map_w brings eight of each in turn
};

// Loads stages. Rows of x that no box covers keep what shared memory held: their sums are dropped.
// A box that reaches past the last row makes a product take up to 2.4 times as long: of the last
// tile's, only those that blocks of a cluster share do, by up to 15 rows together.
struct Loader {
  const Pipeline& p;
  const TensorMap *map_x, *map_tail, *map_w;
  const Loading& loading;
  int m, rank_m, rank_n;
  unsigned short row_blocks = 0, col_blocks = 0;

  __device__ __forceinline__ Loader(const Pipeline& p_, const Schedule& s, const TensorMap* map_x_,
                                    const TensorMap* map_tail_, const TensorMap* map_w_,
                                    const Loading& loading_)
      : p(p_),
        map_x(map_x_),
        map_tail(map_tail_),
        map_w(map_w_),
        loading(loading_),
        m(s.m),
        rank_m(s.rank_m),
        rank_n(s.rank_n) {
    const int layer = s.rank_k * kClusterM * kClusterN;  // first rank of those with this share of k
    for (int j = 0; j < kClusterN; ++j) row_blocks |= 1 << (layer + j * kClusterM + s.rank_m);
    for (int i = 0; i < kClusterM; ++i) col_blocks |= 1 << (layer + s.rank_n * kClusterM + i);
  }

  // How many rows of x a block loads of the tile that begins at `row`.
  __device__ __forceinline__ int part(int row) const {
    if (row + TILE_M <= m) return loading.x_part;
    return row < m ? loading.tail_part : 0;
  }

  // `stage_k` is a stage's worth of k, `stage` a place in the ring, `tile` the first row and column.
  __device__ __forceinline__ void weight(int stage, int stage_k, int2 tile) const {
    const unsigned full = p.full + stage * 8, to = p.w + stage * kStageW;
    mbarrier_arrive_expect_tx(full, kDepth * (part(tile.x) * kClusterN * kRowBytes90 + kBytesW));
    const int row = tile.y + rank_m * kPartW;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int k = stage_k * kStageK + d * kBlockK;
      const unsigned block = to + d * kBytesW + rank_m * kPartW * kRowBytes90;
      if constexpr (kClusterM == 1) {
        if (is_split())
          tma_load_4d(block, map_w, k, 0, 0, row / 16, full);
        else
          tma_load_2d(block, map_w, k, row, full);
      } else {
        if (is_split())
          tma_load_4d_multicast(block, map_w, k, 0, 0, row / 16, full, col_blocks);
        else
          tma_load_2d_multicast(block, map_w, k, row, full, col_blocks);
      }
    }
  }
  __device__ __forceinline__ void x(int stage, int stage_k, int2 tile) const {
    const int rows = part(tile.x), row = tile.x + rank_n * rows;
    if (rows == 0) return;
    const unsigned full = p.full + stage * 8;
    const unsigned to = p.x + stage * p.stage_x + rank_n * rows * kRowBytes90;
    const TensorMap* map = tile.x + TILE_M <= m ? map_x : map_tail;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int k = stage_k * kStageK + d * kBlockK;
      if constexpr (kClusterN == 1)
        tma_load_2d(to + d * p.block_x, map, k, row, full);
      else
        tma_load_2d_multicast(to + d * p.block_x, map, k, row, full, row_blocks);
    }
  }
  // To the L2 cache only.
  __device__ __forceinline__ void prefetch_weight(int stage_k, int column) const {
    const int row = column + rank_m * kPartW;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int k = stage_k * kStageK + d * kBlockK;
      if (is_split())
        tma_prefetch_4d(map_w, k, 0, 0, row / 16);
      else
        tma_prefetch_2d(map_w, k, row);
    }
  }

 private:
  static constexpr int kPartW = TILE_N / kClusterM;  // rows of weight that a block loads of a tile

  // Only whole pairs of eight can come apart.
  __device__ __forceinline__ bool is_split() const { return kPartW % 16 == 0 && loading.is_split; }
};

// Of the first tile's weight, what fits into the ring is on its way, or in the L2 cache, before the
// kernel in front has ended.
__device__ __forceinline__ void load_early(const Pipeline& p, const Schedule& s,
                                           const Loader& loader) {
  const int2 tile = s.tile(s.first());
  for (int i = 0; i < min(s.last_k - s.first_k, p.stages); ++i) {
    if (loader.loading.uses_pdl)
      loader.weight(i, s.first_k + i, tile);
    else
      loader.prefetch_weight(s.first_k + i, tile.y);
  }
}

__device__ __forceinline__ void produce(const Pipeline& p, const Schedule& s,
                                        const Loader& loader) {
  int early = loader.loading.uses_pdl ? min(s.last_k - s.first_k, p.stages) : 0;
  pdl_wait();
  Ring ring;
  for (int index = s.first(); index < s.count(); index += s.step()) {
    const int2 tile = s.tile(index);
#pragma unroll 1
    for (int k = s.first_k; k < s.last_k; ++k) {
      if (early > 0) {
        --early;
      } else {
        mbarrier_wait(p.empty + ring.stage * 8, ring.phase ^ 1);
        loader.weight(ring.stage, k, tile);
      }
      loader.x(ring.stage, k, tile);
      ring.advance(p.stages);
    }
  }
}

// ---- consumers -------------------------------------------------------------------------------

using Sums = float[kBlocksM][kWarpgroupCols / 2];

// Lets go of a stage: one thread tells each block that loads into it.
__device__ __forceinline__ void release(const Pipeline& p, const Schedule& s, int stage) {
  const int thread = threadIdx.x % 128;
  const unsigned empty = p.empty + stage * 8;
  if constexpr (kClusterM * kClusterN == 1) {
    if (thread == 0) mbarrier_arrive(empty);
  } else if (thread < kClusterM + kClusterN - 1) {
    const int layer = s.rank_k * kClusterM * kClusterN;
    int i = s.rank_m, j = thread;  // this row's blocks first, then the others of this column
    if (thread >= kClusterN) {
      i = thread - kClusterN + (thread - kClusterN >= s.rank_m);
      j = s.rank_n;
    }
    mbarrier_arrive_cluster(empty, layer + j * kClusterM + i);
  }
}

// Sums this block's share of k into `acc`. In a warm-up pass: the same instructions once, on whatever
// shared memory holds; nobody is waited for and nothing is let go of.
__device__ __forceinline__ void multiply(const Pipeline& p, const Schedule& s, int warpgroup,
                                         bool is_warmup, Ring& ring, Sums& acc) {
  const unsigned rows = p.x + (kSharesColumns ? 0 : warpgroup * kBlocksM * 64 * kRowBytes90);
  const unsigned cols = p.w + (kSharesColumns ? warpgroup * kWarpgroupCols * kRowBytes90 : 0);
  const unsigned full = is_warmup ? p.idle : p.full;
  const int last_k = is_warmup ? s.first_k + 1 : s.last_k;
  if (is_warmup) ring.phase = 1;                 // the phase before the first: it is over
  ring.stage = __shfl_sync(~0u, ring.stage, 0);  // the same for all lanes, and said so
  int last = 0;
#pragma unroll 1
  for (int i = s.first_k; i < last_k; ++i) {
    mbarrier_wait(full + ring.stage * 8, ring.phase);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const uint64_t a = wgmma_descriptor(rows + ring.stage * p.stage_x + d * p.block_x);
      const uint64_t b = wgmma_descriptor(cols + ring.stage * kStageW + d * kBytesW);
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step)
#pragma unroll
        for (int j = 0; j < kBlocksM; ++j)
          wgmma<kWarpgroupCols>(acc[j], a + j * (64 * kRowBytes90 / 16) + step * 2, b + step * 2,
                                i > s.first_k || d > 0 || step > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the stage before this one has been read
    if (i > s.first_k) release(p, s, last);
    last = ring.stage;
    ring.advance(p.stages);
  }
  wgmma_wait<0>();
  if (is_warmup)
    ring = Ring{};
  else
    release(p, s, last);
#pragma unroll
  for (int j = 0; j < kBlocksM; ++j) wgmma_pin(acc[j]);
}
