// A warp's ring of stages, filled by cp.async.
#pragma once

#include "common/few_rows.cuh"
#include "common/weight_stage.cuh"
#include "gemm_wna16/gemm_wna16_few_rows_block.cuh"

// Loads the stages of a warp in the order it multiplies them.
struct StageLoader : StageCopier<FewRowsParams> {
  const FewRowsBlock& b;
  int unit;  // of the next stage

  __device__ __forceinline__ StageLoader(const FewRowsParams& p, const FewRowsBlock& b)
      : StageCopier<FewRowsParams>{p, b.lane_idx, b.k_tiles}, b(b), unit(b.first_unit()) {
    to = smem_address(b.ring) + b.lane_idx * 16;
    start_unit();
  }

  __device__ __forceinline__ void start_unit() {
    if (b.stage_begin >= b.stage_end) unit = p.num_units;
    go_to(min(b.row_tile(unit, threadIdx.z), b.row_tiles - 1), b.stage_begin);
  }

  // Always commits a group of copies, an empty one at the end: the wait counts groups.
  __device__ __forceinline__ void load() {
    if (unit < p.num_units) {
      load_stage();
      if (stage == b.stage_end) unit += b.unit_step(), start_unit();
    }
    cp_async_commit();
    to += kStageBytes;
    const uint32_t end = smem_address(b.ring) + b.lane_idx * 16 + p.num_stages * kStageBytes;
    if (to == end) to -= p.num_stages * kStageBytes;
  }
};
