// The consumer warpgroups of moe_wgrad_sm90.cu: wgmma on the stages of the ring, then the store.
#pragma once

#include "moe_wgrad/moe_wgrad_config_sm90.cuh"

using WgradSums = float[kTileB / 2];

// Starts the products of kSteps steps of 16 rows, from `step` on.
//
// NOTE: no branch may separate wgmmas of one group, or each would become a group of its own.
template <int kSteps>
__device__ __forceinline__ void start(WgradSums& acc, unsigned a, unsigned b, int step,
                                      bool accumulate) {
  const uint64_t from_a = wgmma_descriptor_transposed(a, kChunkBytes) + step * 128;
  const uint64_t from_b = wgmma_descriptor_transposed(b, kChunkBytes) + step * 128;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    wgmma<kTileB, true, true>(acc, from_a + i * 128, from_b + i * 128, accumulate || i > 0);
  wgmma_commit();
}

// Sums 64 columns of A over an expert's `count` rows.
__device__ __forceinline__ void multiply(WgradShared& smem, int warpgroup, int count,
                                         PipelineState<kStages>& state, WgradSums& acc) {
  const unsigned a = smem_address(smem.a[0]) + warpgroup * kChunkBytes;
  const unsigned b = smem_address(smem.b[0]);
  const auto release = [&](int stage) {  // each CTA of the cluster loads into it
    const unsigned rank = threadIdx.x % 128;
    if (rank < kCluster) mbarrier_arrive_cluster(smem_address(&smem.empty[stage]), rank);
  };
  state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
  const auto await = [&] {
    mbarrier_wait(smem_address(&smem.full[state.stage]), state.phase);
    fence_async_proxy();  // SAFETY: cp.async wrote the gathered operand, wgmma reads it.
  };
  int last = -1;
#pragma unroll 1
  for (int row = 0; row + kSlabRows <= count; row += kSlabRows) {
    await();
    start<kSlabRows / 16>(acc, a + state.stage * kBytesA, b + state.stage * kBytesB, 0, row > 0);
    wgmma_wait<1>();  // the previous stage has been read
    if (row > 0) release(last);
    last = state.stage;
    state.advance();
  }
  if (count % kSlabRows > 0) {  // the last slab: only steps with rows
    await();
#pragma unroll 1
    for (int step = 0; step * 16 < count % kSlabRows; ++step)
      start<1>(acc, a + state.stage * kBytesA, b + state.stage * kBytesB, step,
               count >= kSlabRows || step > 0);
    wgmma_wait<0>();
    if (last >= 0) release(last);
    last = state.stage;
    state.advance();
  }
  wgmma_wait<0>();
  if (last >= 0) release(last);
  wgmma_pin(acc);
}

// Rounds 16 x 64 sums of a warp to shared memory. A transposed result has rows of 64 columns of A,
// to which each warp of the warpgroup contributes 16.
template <bool kTransposed>
__device__ __forceinline__ void stage_chunk(unsigned to, const float* sums) {
  const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x % 128 / 32;
  // Matrices: 8 by 8, 2 x 2.
  const int row = kTransposed ? lane_idx % 8 + lane_idx / 16 * 8 : lane_idx % 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float* v = sums + j * 8;
    const unsigned a = pack2<scalar_t>(v[0], v[1]), b = pack2<scalar_t>(v[2], v[3]);
    const unsigned c = pack2<scalar_t>(v[4], v[5]), d = pack2<scalar_t>(v[6], v[7]);
    if constexpr (kTransposed) {
      const int chunk = (warp_idx * 2 + lane_idx / 8 % 2) ^ (row & 7);
      stmatrix_x4_transposed(to + (j * 16 + row) * 128 + chunk * 16, a, b, c, d);
    } else {
      const int chunk = (2 * j + lane_idx / 16) ^ (row & 7);
      stmatrix_x4(to + (warp_idx * 16 + row) * 128 + chunk * 16, a, b, c, d);
    }
  }
}

// Stores a warpgroup's sums by TMA, 64 columns of B at a time; the stores of two such chunks may be
// in flight while the next tile is multiplied. If A is dy, a warp stores its own 16 rows. If A is
// x, the sums are transposed, and one thread stores those of the warpgroup.
__device__ __forceinline__ void store(WgradShared& smem, const MoeWgradSm90Params& p, int warpgroup,
                                      const WgradTile& tile, const WgradSums& acc) {
  const int warp_idx = threadIdx.x % 128 / 32, a = tile.a + warpgroup * kChunkColumns;
  const bool stores = threadIdx.x % (kGathersX ? 128 : 32) == 0;
  const auto sync = [&] {
    if constexpr (kGathersX)
      named_barrier_sync<128>(1 + warpgroup);
    else
      __syncwarp();
  };
  if (a >= (kGathersX ? p.k : p.num_rows)) return;
#pragma unroll
  for (int c = 0; c < kChunksB; ++c) {
    const int b = tile.b + c * kChunkColumns;
    if (b >= (kGathersX ? p.num_rows : p.k)) break;
    const unsigned to = smem_address(smem.staging[warpgroup][c % 2]);
    if (stores) {  // the last store from this buffer has read it
      if (c == 0)
        bulk_wait_read<0>();  // the previous tile may have ended with either buffer
      else
        bulk_wait_read<1>();
    }
    sync();
    stage_chunk<kGathersX>(to, acc + c * 32);
    fence_async_proxy();
    sync();
    if (!stores) continue;
    if constexpr (kGathersX)
      tma_store_3d(&p.map_out, a, b, tile.expert, to);
    else if (a + warp_idx * 16 < p.num_rows)
      tma_store_3d(&p.map_out, b, a + warp_idx * 16, tile.expert, to + warp_idx * 16 * 128);
    bulk_commit();
  }
}

__device__ __forceinline__ void consume(WgradShared& smem, const MoeWgradSm90Params& p) {
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
  const WgradScheduler scheduler(p);
  PipelineState<kStages> state(0);
#pragma unroll 1
  for (int index = scheduler.first(); index < scheduler.count; index += scheduler.step()) {
    const WgradTile tile = scheduler.tile(index);
    const ExpertRows rows(p.offsets, tile.expert, p.num_pairs);
    WgradSums acc = {};  // an expert without rows has zeros
    multiply(smem, warpgroup, rows.count, state, acc);
    store(smem, p, warpgroup, tile, acc);
  }
  if (threadIdx.x % 32 == 0) bulk_wait();  // shared memory must outlive the stores in flight
  __syncwarp();
}
