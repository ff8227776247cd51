// Producer for scalar_t weights in moe_gemm_sm90.cu: one warpgroup that fills the ring of stages.
#pragma once

#include "common/pdl.cuh"
#include "moe_gemm/moe_loader_sm90.cuh"

// Loads the weight by TMA, one m-tile per box, and announces the stage's bytes. Called by one
// thread.
__device__ __forceinline__ void MoeLoader::weight(int stage, int slab, const MoeTile& tile) const {
  const unsigned full = smem_address(&smem.full[stage]);
  const int depth = min(kDepth, num_slabs() - slab);
  mbarrier_arrive_expect_tx(full, depth * (kSlabW + sorted_rows(tile) * kSlabRowBytes));
  for (int d = 0; d < depth; ++d)
#pragma unroll
    for (int part = 0; part < kPartsW; ++part) {
      const int row = num_gates > 0 ? tile.row + part / 2 * kMmaM + part % 2 * num_gates
                                    : tile.row + part * kMmaM;
      tma_load_3d(smem_address(smem.w[stage]) + d * kSlabW + part * kMmaBytes, map_w,
                  kTransposed ? row : (slab + d) * kSlabK, kTransposed ? (slab + d) * kSlabK : row,
                  tile.expert, full);
    }
}

// Loads the first tile's weights first, as far as the ring allows; with `is_early` even before the
// preceding kernel has ended. The next kernel may start once this one has waited.
__device__ __forceinline__ void produce(MoeShared& smem, MoeLoader& load,
                                        const MoeScheduler& scheduler, bool is_early) {
  const int count = scheduler.count(), first = blockIdx.x;
  const bool is_first = load.thread() == 0;
  int early = 0;
  if (first < count) {
    const MoeTile tile = scheduler.tile(first);
    early = min(kStages, (load.num_slabs() + kDepth - 1) / kDepth);
    if (is_first)
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
    if (!load.is_gathered() && !is_first) continue;
    load.begin(tile);
#pragma unroll 1
    for (int slab = 0; slab < load.num_slabs(); slab += kDepth) {
      if (early > 0) {
        --early;
      } else {
        mbarrier_wait(smem_address(&smem.empty[state.stage]), state.phase);
        if (is_first) load.weight(state.stage, slab, tile);
      }
      if (load.is_gathered())
        load.gather(state.stage, slab);
      else
        load.sorted(state.stage, slab, tile, 0, 1);
      state.advance();
    }
  }
}
