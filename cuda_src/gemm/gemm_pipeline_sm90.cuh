// Shared memory and mbarriers of gemm_sm90.cu's ring of stages.
#pragma once

#include "gemm/gemm_config_sm90.cuh"

// PipelineState (common/pipeline_state.cuh) with the number of stages set at launch: a consumer
// starts with parity 0, the producer with 1.
struct DynamicPipelineState {
  int stage = 0;
  unsigned phase;

  __device__ __forceinline__ explicit DynamicPipelineState(unsigned phase) : phase(phase) {}
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Addresses in shared memory: stages of x, stages of the weight, staging of results, sums from
// other CTAs, mbarriers (a full and an empty one per stage). Nothing arrives on `idle`: the warm-up
// pass waits on it for a phase that counts as completed. `stored` counts the consumer warps that
// have stored their part of a tile to send. For tiles of up to 64 rows the launch sets the number
// of stages and their rows of x.
struct Pipeline {
  int stages, slab_x, stage_x;  // number of stages; bytes per slab and per stage of x
  unsigned x, w, staging, sums, full, empty, sums_barrier, idle, stored;

  __device__ __forceinline__ Pipeline(unsigned smem, int launch_stages, int x_rows) {
    stages = kTileM <= 64 ? launch_stages : kStages;
    slab_x = kTileM <= 64 ? x_rows * kSlabRowBytes : kBytesX;
    stage_x = kDepth * slab_x;
    x = smem;
    w = x + stages * stage_x;
    staging = w + stages * kStageW;
    sums = staging + kBytesStaging;
    full = sums + kBytesSums;
    empty = full + stages * 8;
    sums_barrier = empty + stages * 8;
    idle = sums_barrier + 8;
    stored = idle + 8;
  }

  // A stage is full when its bytes have arrived, and empty when every warpgroup that reads this
  // CTA's loads (those in its row and column of the cluster) has released it. `sums_rows`: the
  // tile's rows for which other CTAs send sums, rounded up to a warp's 16.
  __device__ __forceinline__ void init(int sums_rows) const {
    for (int i = 0; i < stages; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, kConsumerWarpgroups * (kClusterM + kClusterN - 1));
    }
    mbarrier_init(idle, 1);
    if constexpr (kSends) asm volatile("st.shared.u32 [%0], 0;" ::"r"(stored) : "memory");
    if constexpr (kClusterK > 1) {
      mbarrier_init(sums_barrier, 1);
      mbarrier_arrive_expect_tx(sums_barrier, (kClusterK - 1) * sums_rows * kSlice * 4);
    }
    mbarrier_init_fence();
  }
};
