// The scan of gated_delta_chunks.cu for Hopper: the same walk, with wgmma for the products.
//
// Parameters, numerics and mirror: as gated_delta_chunks.cu.
#include "gated_delta/gated_delta_scan_sm90.cuh"

extern __shared__ __align__(1024) unsigned char smem_bytes[];

#define ENGINE_GATED_DELTA_SCAN(slice, stages)                                               \
  static_assert(sizeof(ScanRing<slice, stages>) == SCAN_BYTES_##slice##_##stages,            \
                "the host launches with this size");                                         \
  extern "C" __global__ void __launch_bounds__(ScanRing<slice, stages>::kThreads, 1)         \
      gated_delta_scan_sm90_##slice##_##stages(const __grid_constant__ GatedDeltaParams p) { \
    if constexpr (kValueDim % slice == 0) scan_chunks_sm90<slice, stages>(p, smem_bytes);    \
  }

// Features of v per CTA; stages in shared memory.
ENGINE_GATED_DELTA_SCAN(64, 2)
ENGINE_GATED_DELTA_SCAN(64, 3)
ENGINE_GATED_DELTA_SCAN(128, 2)
ENGINE_GATED_DELTA_SCAN(128, 3)
