// out = a b^T on Hopper: TMA copies tiles into a ring of stages, wgmma multiplies them there.
//
// A block has three warpgroups. One thread of the first, the producer, starts the copies; the other
// two, the consumers, multiply 64 x 256 outputs each. A stage's `full` mbarrier completes when its
// bytes have arrived, its `empty` mbarrier when all consumers have released it, so nobody waits for
// __syncthreads(). Two blocks form a cluster: each loads its own 128 rows of a and half of the 256
// rows of b, and multicasts that half to both. Blocks are persistent: the producer loads the next
// tile while the consumers store the last one.
#include "common/pipeline_state.cuh"
#include "common/sm90.cuh"
#include "common/swizzle.cuh"
#include "common/wgmma.cuh"

constexpr int kTileM = 128, kTileN = 256;  // outputs of a block
constexpr int kTileK = 64;                 // values of k per stage: rows of 128 bytes, one swizzle
constexpr int kStages = 4, kConsumers = 2, kCluster = 2;
constexpr int kThreads = (1 + kConsumers) * 128;
constexpr int kBand = 8;  // rows of clusters per band; see tile_of
constexpr int kRowBytes = kSwizzleRowBytes;
constexpr int kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes;
constexpr int kStageBytes = kBytesA + kBytesB;
constexpr int kStagingBytes = 16 * kRowBytes;  // 16 rows, 64 columns of a warp's results

// Shared memory, as 32-bit addresses: stages, two staging buffers per consumer warp, mbarriers.
struct Shared {
  unsigned ring, staging, full, empty;

  // The swizzle needs stages that begin at multiples of 1024 bytes.
  __device__ __forceinline__ explicit Shared(const void* smem)
      : ring((smem_address(smem) + 1023) / 1024 * 1024),
        staging(ring + kStages * kStageBytes),
        full(staging + kConsumers * 4 * 2 * kStagingBytes),
        empty(full + kStages * 8) {}
  __device__ __forceinline__ unsigned a(int stage) const { return ring + stage * kStageBytes; }
  __device__ __forceinline__ unsigned b(int stage) const { return a(stage) + kBytesA; }

  // One thread calls it. A stage is empty when the consumers of both blocks have released it:
  // either producer writes to both blocks.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, kConsumers * kCluster);
    }
    mbarrier_init_fence();
  }
};

// First row and column of this block's tile in the cluster's work tile `index`. The order runs down
// kBand rows of work tiles before it moves right: concurrent blocks then share rows of a and b in
// L2.
__device__ __forceinline__ int2 tile_of(int index, int rows, int cols) {
  const int band = index / (kBand * cols), within = index % (kBand * cols);
  const int height = min(kBand, rows - band * kBand);
  const int row = band * kBand + within % height, col = within / height;
  return {(row * kCluster + cluster_rank()) * kTileM, col * kTileN};
}

// Fills stage after stage. One thread calls it.
__device__ __forceinline__ void load_tile(const Shared& s, PipelineState<kStages>& state,
                                          const TensorMap& map_a, const TensorMap& map_b, int2 tile,
                                          int K) {
  constexpr int kHalf = kTileN / kCluster;
  for (int k = 0; k < K; k += kTileK, state.advance()) {
    mbarrier_wait(s.empty + state.stage * 8, state.phase);
    const unsigned full = s.full + state.stage * 8;
    mbarrier_arrive_expect_tx(full, kStageBytes);  // both halves of b count here
    tma_load_2d(s.a(state.stage), &map_a, k, tile.x, full);
    const int first = cluster_rank() * kHalf;
    tma_load_2d_multicast(s.b(state.stage) + first * kRowBytes, &map_b, k, tile.y + first, full,
                          (1 << kCluster) - 1);
  }
}

using Sums = float[kTileN / 2];

// Tells the producers of both blocks that this warpgroup has read the stage.
__device__ __forceinline__ void release(const Shared& s, int stage) {
  const int thread = threadIdx.x % 128;
  if (thread < kCluster) mbarrier_arrive_cluster(s.empty + stage * 8, thread);
}

// acc = the sums over k of 64 rows: a warpgroup's part of the tile.
__device__ __forceinline__ void multiply(const Shared& s, PipelineState<kStages>& state, Sums& acc,
                                         int consumer, int K) {
  int last = 0;
  for (int k = 0; k < K; k += kTileK) {
    mbarrier_wait(s.full + state.stage * 8, state.phase);
    wgmma_fence();
    const uint64_t a = wgmma_descriptor(s.a(state.stage) + consumer * 64 * kRowBytes);
    const uint64_t b = wgmma_descriptor(s.b(state.stage));
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step)  // 16 values are 32 bytes: 2 in a descriptor
      wgmma<kTileN>(acc, a + step * 2, b + step * 2, k > 0 || step > 0);
    wgmma_commit();
    wgmma_wait<1>();  // the previous stage has been read; this one is still being multiplied
    if (k > 0) release(s, last);
    last = state.stage;
    state.advance();
  }
  wgmma_wait<0>();
  release(s, last);
  wgmma_pin(acc);
}

// Rounds a warp's 16 rows and stores them, 64 columns at a time, through two alternating buffers:
// TMA copies from one while the other is filled, and clips what lies outside the matrix.
__device__ __forceinline__ void store(const Sums& acc, unsigned staging, const TensorMap& map_out,
                                      int row, int col) {
  const int lane_idx = threadIdx.x % 32, r = lane_idx % 16;
#pragma unroll
  for (int chunk = 0; chunk < kTileN / 64; ++chunk) {
    const unsigned to = staging + chunk % 2 * kStagingBytes;
    if (lane_idx == 0) bulk_wait_read<1>();
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // 16 columns: four 8 x 8 matrices
      const float* x = acc + chunk * 32 + pair * 8;
      stmatrix_x4(to + swizzle_128b(r, pair * 2 + lane_idx / 16), pack2<scalar_t>(x[0], x[1]),
                  pack2<scalar_t>(x[2], x[3]), pack2<scalar_t>(x[4], x[5]),
                  pack2<scalar_t>(x[6], x[7]));
    }
    fence_async_proxy();
    __syncwarp();
    if (lane_idx == 0) {
      tma_store_2d(&map_out, col + chunk * 64, row, to);
      bulk_commit();
    }
  }
}

// Boxes (rows, columns): map_a and map_b 128 x 64, map_out 16 x 64, all with the 128-byte swizzle.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    product_tma(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                const __grid_constant__ TensorMap map_out, int M, int N, int K) {
  extern __shared__ unsigned char smem[];
  const Shared s(smem);
  const int rows = (M + kTileM * kCluster - 1) / (kTileM * kCluster);
  const int cols = (N + kTileN - 1) / kTileN;
  const int warp_idx = __shfl_sync(~0u, threadIdx.x / 32, 0);  // ptxas learns that it is uniform
  if (threadIdx.x == 0) s.init();
  cluster_sync();

  if (warp_idx < 4) {
    warpgroup_reg_dealloc<40>();
    if (warp_idx == 0 && elect_one()) {
      PipelineState<kStages> state(1);  // all stages are empty
      for (int i = cluster_index(); i < rows * cols; i += num_clusters())
        load_tile(s, state, map_a, map_b, tile_of(i, rows, cols), K);
    }
  } else {
    warpgroup_reg_alloc<232>();
    const int warp = warp_idx - 4;
    const unsigned staging = s.staging + warp * 2 * kStagingBytes;
    PipelineState<kStages> state(0);
    for (int i = cluster_index(); i < rows * cols; i += num_clusters()) {
      Sums acc;
      multiply(s, state, acc, warp / 4, K);
      const int2 tile = tile_of(i, rows, cols);
      store(acc, staging, map_out, tile.x + warp * 16, tile.y);
    }
    bulk_wait();  // stores read shared memory, which must outlive them
  }
  // SAFETY: a block must not end while the other one multicasts to it or arrives on its mbarriers.
  cluster_sync_relaxed();
}
