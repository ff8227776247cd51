// The body of gemm_wna16_sm90.cu and gemm_wna16_adapted_sm90.cu, whose Params have the same fields.
#pragma once

#include "gemm_wna16/gemm_wna16_consumer_sm90.cuh"
#include "gemm_wna16/gemm_wna16_producer_sm90.cuh"

// `low_rank`: what the epilogue adds to the sums, LowRank or NoLowRank.
template <typename Params, typename Addend>
__device__ __forceinline__ void gemm_wna16_sm90(const Params& p, const Addend& low_rank) {
  pdl_trigger();
  extern __shared__ unsigned char smem_raw[];
  Shared& smem = *reinterpret_cast<Shared*>(smem_raw + (-smem_address(smem_raw) & 1023));
  // The shuffle tells ptxas that it is warp-uniform.
  const int warp_idx = __shfl_sync(~0u, static_cast<int>(threadIdx.x / kWarpSize), 0);
  const int width = p.num_gates > 0 ? kRows / 2 : kRows;
  const int columns = p.num_gates > 0 ? p.num_gates : p.n;
  const TileScheduler scheduler{(p.m + kTokens - 1) / kTokens, (columns + width - 1) / width};
  const int rank = kSplits > 1 ? cluster_rank() : 0;
  const int stages_k = (p.slabs + kDepth - 1) / kDepth;
  const int first_k = stages_k * rank / kSplits;
  const int last_k = stages_k * (rank + 1) / kSplits;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.map_x);
    tma_prefetch_map(&p.map_tail);
    tma_prefetch_map(&p.map_data);
    tma_prefetch_map(&p.map_scales);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&smem.full[i]), 1);
      mbarrier_init(smem_address(&smem.empty[i]), kConsumerThreads);
    }
    if constexpr (kSplits > 1) {
      mbarrier_init(smem_address(&smem.sums_full), 1);
      mbarrier_arrive_expect_tx(smem_address(&smem.sums_full),
                                (kSplits - 1) * kSliceSums * kConsumerThreads * 4);
    }
    mbarrier_init_fence();
  }
  if (kSplits > 1)
    cluster_sync_relaxed();  // the initialisation includes the fence
  else
    __syncthreads();
  // Producer and consumers diverge here and never reconverge, as setmaxnreg requires.
  if (warp_idx >= kConsumerThreads / kWarpSize) {
    if constexpr (kMovesRegisters) warpgroup_reg_dealloc<kProducerRegisters>();
    if (warp_idx == kConsumerThreads / kWarpSize && elect_one()) {
      const Loader load{smem,          &p.map_x,    &p.map_tail,
                        &p.map_data,   &p.map_high, &p.map_scales,
                        &p.map_supers, p.slabs,     p.num_gates / kTileRows,
                        p.m,           p.x_part,    p.tail_part,
                        first_k,       last_k};
      produce(load, scheduler, p.is_early != 0);
    }
  } else {
    if constexpr (kMovesRegisters) warpgroup_reg_alloc<kConsumerRegisters>();
    const RowEpilogue epilogue{Epilogue{p.bias, p.residual, p.out, p.residual_stride, p.out_stride,
                                        p.activation, p.is_float != 0, p.is_vector != 0},
                               columns, p.num_gates};
    const Consumer consumer{smem,
                            p.slabs,
                            first_k,
                            last_k,
                            warp_idx / 4,
                            warp_idx,
                            static_cast<int>(threadIdx.x % kWarpSize),
                            p.num_gates > 0};
    consume(consumer, epilogue, scheduler, p.m, p.n, low_rank);
  }
}
