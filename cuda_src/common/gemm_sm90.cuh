// The parts of gemm_sm90.cu: tiles and their order, the ring of stages, loads and products.
#pragma once

#include "common/gemm_problem.cuh"
#include "common/sm90.cuh"
#include "common/wgmma.cuh"

constexpr int kMaxK = 64;  // of k in a stage: 128 bytes a row, the widest swizzle
constexpr int kWarpgroups = TILE_M == 64 ? 1 : TILE_M == 192 ? 3 : 2;  // those that multiply
constexpr int kBlocksM = TILE_M / 64 / kWarpgroups;                    // of 64 rows a warpgroup
constexpr int kThreads = (1 + kWarpgroups) * 128;
constexpr int kConsumers = kWarpgroups * 128;
constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 40;
constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 232;
static_assert(TILE_M == kWarpgroups * kBlocksM * 64 && TILE_N % 32 == 0, "no such tile");

constexpr int kClusterM = CLUSTER_M, kClusterN = CLUSTER_N, kClusterK = CLUSTER_K;
constexpr int kClusterSize = kClusterM * kClusterN * kClusterK;
static_assert(TILE_M % (8 * kClusterN) == 0 && TILE_N % (8 * kClusterM) == 0, "atoms are 8 rows");

constexpr int kRowBytes90 = 128;
constexpr int kBytesX = TILE_M * kRowBytes90, kBytesW = TILE_N * kRowBytes90;
constexpr int kStages = STAGES;
constexpr int kWarpStaging = 16 * 128;  // a warp's 16 rows on their way to global memory
constexpr int kOffsetStaging = kStages * (kBytesX + kBytesW);
constexpr int kOffsetSums = kOffsetStaging + kConsumers / 32 * kWarpStaging;
constexpr int kSlice = TILE_N / kClusterK;  // columns that a block finishes of a tile it shares
constexpr int kBytesSums = (kClusterK - 1) * TILE_M * kSlice * 4;  // from the cluster's others
constexpr int kOffsetBarriers = kOffsetSums + kBytesSums;
static_assert(kOffsetBarriers + kStages * 16 + 8 + 1024 <= 232448, "more than a block may have");
static_assert(kClusterK == 1 || (kBlocksM == 1 && kSlice % 16 == 0), "no such share of a tile");

// The swizzle's atoms of 1024 bytes must be aligned; every block of a cluster moves by as much.
__device__ __forceinline__ unsigned char* align_smem(unsigned char* p) {
  return p + (-smem_address(p) & 1023);
}

// ---- the order of tiles ----------------------------------------------------------------------

// A cluster makes CLUSTER_M x CLUSTER_N tiles at a time. Clusters go down `group` rows of such
// super-tiles before they go right: what runs at one time reads few rows of x and of weight.
struct Schedule {
  int m, n, group, rows, cols;   // rows and cols of super-tiles
  int rank_m, rank_n, rank_k;    // of this block in its cluster
  int first_k, last_k;           // blocks of k that this block sums

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
    const int blocks_k = (k + kMaxK - 1) / kMaxK;
    first_k = blocks_k * rank_k / kClusterK;
    last_k = blocks_k * (rank_k + 1) / kClusterK;
  }

  __device__ __forceinline__ int first() const { return blockIdx.x / kClusterSize; }
  __device__ __forceinline__ int step() const { return gridDim.x / kClusterSize; }
  __device__ __forceinline__ int count() const { return rows * cols; }

  // The first row and column of this block's tile of the super-tile.
  __device__ __forceinline__ int2 tile(int index) const {
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

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct Pipeline {
  unsigned x, w, full, empty, sums;  // shared memory: stages of x and of weight, mbarriers

  __device__ __forceinline__ explicit Pipeline(unsigned smem)
      : x(smem),
        w(smem + kStages * kBytesX),
        full(smem + kOffsetBarriers),
        empty(smem + kOffsetBarriers + kStages * 8),
        sums(smem + kOffsetBarriers + kStages * 16) {}

  // A stage is full when its bytes are there, and empty when every warpgroup that reads what this
  // block loads has let go of it: those of this block's row and column of the cluster.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, kWarpgroups * (kClusterM + kClusterN - 1));
    }
    if constexpr (kClusterK > 1) {
      mbarrier_init(sums, 1);
      mbarrier_arrive_expect(sums, kBytesSums);
    }
    mbarrier_init_fence();
  }
};

// ---- producer --------------------------------------------------------------------------------

// Loads kRows rows of a tile for kSharers blocks, of which this one, number `part`, loads its part.
template <int kRows, int kSharers>
__device__ __forceinline__ void load_tile(unsigned to, const TensorMap* map, int k, int row,
                                          unsigned full, int part, unsigned short blocks) {
  constexpr int kPart = kRows / kSharers;
  if constexpr (kSharers == 1) tma_load_2d(to, map, k, row, full);
  else
    tma_load_2d_multicast(to + part * kPart * kRowBytes90, map, k, row + part * kPart, full,
                          blocks);
}

__device__ __forceinline__ void produce(const Pipeline& p, const Schedule& s,
                                        const TensorMap* map_x, const TensorMap* map_w) {
  const int layer = s.rank_k * kClusterM * kClusterN;  // first rank of those with this share of k
  unsigned short row_blocks = 0, col_blocks = 0;
  for (int j = 0; j < kClusterN; ++j) row_blocks |= 1 << (layer + j * kClusterM + s.rank_m);
  for (int i = 0; i < kClusterM; ++i) col_blocks |= 1 << (layer + s.rank_n * kClusterM + i);
  Ring ring;
  for (int index = s.first(); index < s.count(); index += s.step()) {
    const int2 tile = s.tile(index);
#pragma unroll 1
    for (int block = s.first_k; block < s.last_k; ++block) {
      const unsigned full = p.full + ring.stage * 8;
      mbarrier_wait(p.empty + ring.stage * 8, ring.phase ^ 1);
      mbarrier_arrive_expect(full, kBytesX + kBytesW);
      load_tile<TILE_M, kClusterN>(p.x + ring.stage * kBytesX, map_x, block * kMaxK, tile.x, full,
                                   s.rank_n, row_blocks);
      load_tile<TILE_N, kClusterM>(p.w + ring.stage * kBytesW, map_w, block * kMaxK, tile.y, full,
                                   s.rank_m, col_blocks);
      ring.advance();
    }
  }
}

// ---- consumers -------------------------------------------------------------------------------

using Sums = float[kBlocksM][TILE_N / 2];

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

// Sums this block's share of k into `acc`.
__device__ __forceinline__ void multiply(const Pipeline& p, const Schedule& s, int warpgroup,
                                         Ring& ring, Sums& acc) {
  const unsigned rows = p.x + warpgroup * kBlocksM * 64 * kRowBytes90;
  int last = 0;
#pragma unroll 1
  for (int block = s.first_k; block < s.last_k; ++block) {
    mbarrier_wait(p.full + ring.stage * 8, ring.phase);
    const uint64_t a = wgmma_descriptor(rows + ring.stage * kBytesX);
    const uint64_t b = wgmma_descriptor(p.w + ring.stage * kBytesW);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kMaxK / 16; ++step)
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i)
        wgmma<TILE_N>(acc[i], a + i * (64 * kRowBytes90 / 16) + step * 2, b + step * 2,
                      block > s.first_k || step > 0);
    wgmma_commit();
    wgmma_wait<1>();  // the stage before this one has been read
    if (block > s.first_k) release(p, s, last);
    last = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  release(p, s, last);
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) wgmma_pin(acc[i]);
}
