// A warp's ring of stages, filled by cp.async.
#pragma once

#include "common/few_rows.cuh"
#include "common/weight_stage.cuh"
#include "gemm_wna16/gemm_wna16_few_rows_block.cuh"

// Loads a warp's stages in order of use.
struct StageLoader : StageCopier<FewRowsParams> {
  const FewRowsBlock& b;
  int work_tile;  // work tile of the next stage

  __device__ __forceinline__ StageLoader(const FewRowsParams& p, const FewRowsBlock& b)
      : StageCopier<FewRowsParams>{p, b.lane_idx, b.k_tiles}, b(b), work_tile(b.first_work_tile()) {
    to = smem_address(b.ring) + b.lane_idx * 16;
    start_work_tile();
  }

  __device__ __forceinline__ void start_work_tile() {
    if (b.stage_begin >= b.stage_end) work_tile = p.num_work_tiles;
    go_to(min(b.row_tile(work_tile, threadIdx.z), b.row_tiles - 1), b.stage_begin);
  }

  // Always commits a cp.async group, even an empty one: the wait counts groups.
  __device__ __forceinline__ void load() {
    if (work_tile < p.num_work_tiles) {
      load_stage();
      if (stage == b.stage_end) work_tile += b.work_tile_step(), start_work_tile();
    }
    cp_async_commit();
    to += kStageBytes;
    const uint32_t end = smem_address(b.ring) + b.lane_idx * 16 + p.num_stages * kStageBytes;
    if (to == end) to -= p.num_stages * kStageBytes;
  }
  // Fills stages [begin, end) of the ring.
  __device__ __forceinline__ void fill(int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) load();
  }
};
