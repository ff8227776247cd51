// Producer for quantized weights in moe_gemm_sm90.cu: one warpgroup that fills the ring of stages.
#pragma once

#include "common/pdl.cuh"
#include "moe_gemm/moe_loader_sm90.cuh"

struct MoeQuantizedLoader : MoeLoader {
  MoeWeights weights;
  MoeRowScales row_scales;

  __device__ __forceinline__ void begin(const MoeTile& tile) {
    MoeLoader::begin(tile);
    row_scales.begin(thread() >= tile.count ? -1
                     : is_gathered()        ? order[tile.first + thread()] / top_k
                                            : tile.first + thread());
  }

  // Called by all threads; one of them also announces the stage's bytes. Scales are counted like
  // gathered rows of x.
  __device__ __forceinline__ void weight(int stage, int slab, const MoeTile& tile) const {
    unsigned char* to = smem.w[stage];
    if (thread() < kWarpSize) {
      const unsigned full = smem_address(&smem.full[stage]);
      const int depth = min(kDepth, num_slabs() - slab);
      if (thread() == 0)
        mbarrier_arrive_expect_tx(full,
                                  weights.bytes(depth) + depth * sorted_rows(tile) * kSlabRowBytes);
      __syncwarp();
      weights.load(to, slab, depth, tile.expert, tile.row, full);
    }
    weights.load_scales(to, smem.scales[stage], slab, tile.expert, tile.row);
  }

  // Called by all threads.
  __device__ __forceinline__ void rows_of_x(int stage, int slab, const MoeTile& tile) {
    row_scales.load(smem.scales[stage], slab);
    if (is_gathered()) {
      gather(stage, slab);
    } else {
      if (thread() % kWarpSize == 0)
        sorted(stage, slab, tile, thread() / kWarpSize, kProducerThreads / kWarpSize);
      mbarrier_arrive_cp_async(smem_address(&smem.full[stage]));
    }
  }
};

// The producer's loop, in which all threads load weights. See moe_producer_sm90.cuh.
__device__ __forceinline__ void produce(MoeShared& smem, MoeQuantizedLoader& load,
                                        const MoeScheduler& scheduler, bool is_early) {
  const int count = scheduler.count(), first = blockIdx.x;
  int early = 0;
  if (first < count) {
    const MoeTile tile = scheduler.tile(first);
    early = min(kStages, (load.num_slabs() + kDepth - 1) / kDepth);
    for (int i = 0; i < early; ++i) load.weight(i, i * kDepth, tile);
  }
  if (is_early) pdl_wait();
  pdl_trigger();
  PipelineState<kStages> state(1);
  PipelineState<kRecords> record(1);
#pragma unroll 1
  for (int index = first; index < count; index += gridDim.x) {
    const MoeTile tile = scheduler.tile(index);
    load.tell(tile, record);
    load.begin(tile);
#pragma unroll 1
    for (int slab = 0; slab < load.num_slabs(); slab += kDepth) {
      if (early > 0) {
        --early;
      } else {
        // SAFETY: the consumers read weights by ordinary loads.
        mbarrier_wait_to_overwrite(smem_address(&smem.empty[state.stage]), state.phase);
        load.weight(state.stage, slab, tile);
      }
      load.rows_of_x(state.stage, slab, tile);
      state.advance();
    }
  }
}
