// Consumers of moe_gemm_sm90.cu: they compute a tile's sums, then run the epilogue.
#pragma once

#include "moe_gemm/moe_config_sm90.cuh"
#if WEIGHT_KIND == 0
#include "moe_gemm/moe_multiply_sm90.cuh"
#elif WEIGHT_KIND == 3
#include "moe_gemm/moe_multiply_codes_sm90.cuh"
#else
#include "moe_gemm/moe_multiply_quantized_sm90.cuh"
#endif

__device__ __forceinline__ void consume(const MoeEpilogue& e, MoeShared& smem, int num_tiles,
                                        int num_slabs) {
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
  PipelineState<kStages> state(0);
  PipelineState<kRecords> next(0);
#pragma unroll 1
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    mbarrier_wait(smem_address(&smem.record_full[next.stage]), next.phase);
    MoeTileRecord& record = smem.records[next.stage];
    MoeSums acc = {};  // cleared because multiply does not write all of it
    multiply_few(record.tile.count, smem, warpgroup, num_slabs, e, state, acc);
    finish(e, record, warpgroup, acc);
    if constexpr (kQuantizesOut) {
      quantize(e, smem, record, warpgroup, acc[0]);
    } else {
      const int column = record.tile.row + warpgroup * e.warpgroup_columns();
      if (e.is_mixed())
        store<true>(e, smem, record, warpgroup, column, acc[0]);
      else
        store<false>(e, smem, record, warpgroup, column, acc[0]);
      if constexpr (kMmaTiles > 1)
        if (!e.is_gated()) store<false>(e, smem, record, warpgroup, column + kMmaM, acc[1]);
    }
    named_barrier_sync<128>(1 + warpgroup);  // all threads have read the record
    if (threadIdx.x % 128 == 0) mbarrier_arrive(smem_address(&smem.record_empty[next.stage]));
    next.advance();
  }
}
