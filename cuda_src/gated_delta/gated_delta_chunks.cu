// Gated delta rule in chunks of 64 tokens, on tensor cores: prefill.
//
// The algorithm is described in gated_delta_chunk.cuh, the recurrence that it equals in
// gated_delta.cu. Two launches: prepare, all chunks at once, then scan, which walks the chunks of
// each sequence. Arguments: GatedDeltaParams, in gated_delta_problem.cuh.
//
// Numerics: products of 16-bit operands with float sums. T, V - e^c K S^T, X and the state that the
// products read are rounded to scalar_t; the inverse, the decays and the state that is carried are
// float.
// Mirror: engine/reference/gated_delta.py
#include "gated_delta/gated_delta_prepare.cuh"
#include "gated_delta/gated_delta_scan.cuh"

static_assert(sizeof(PrepareShared) == PREPARE_BYTES, "the host launches with this size");

extern __shared__ __align__(1024) unsigned char smem_bytes[];

extern "C" __global__ void __launch_bounds__(kPrepareThreads, kHasChannelGate ? 2 : 4)
    gated_delta_prepare(const __grid_constant__ GatedDeltaParams p) {
  prepare_chunk(p, *reinterpret_cast<PrepareShared*>(smem_bytes));
}

#define ENGINE_GATED_DELTA_SCAN(slice, stages)                                          \
  static_assert(stages * sizeof(ScanStage<slice>) == SCAN_BYTES_##slice##_##stages,     \
                "the host launches with this size");                                    \
  extern "C" __global__ void __launch_bounds__(2 * slice, 1)                            \
      gated_delta_scan_##slice##_##stages(const __grid_constant__ GatedDeltaParams p) { \
    if constexpr (kValueDim % slice == 0) scan_chunks<slice, stages>(p, smem_bytes);    \
  }

// Features of v per block; stages in shared memory.
ENGINE_GATED_DELTA_SCAN(32, 1)
ENGINE_GATED_DELTA_SCAN(32, 2)
ENGINE_GATED_DELTA_SCAN(64, 1)
ENGINE_GATED_DELTA_SCAN(64, 2)
ENGINE_GATED_DELTA_SCAN(128, 1)
ENGINE_GATED_DELTA_SCAN(128, 2)
