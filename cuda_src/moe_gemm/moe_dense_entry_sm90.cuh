// Entry point of moe_gemm_sm90.cu for weights of scalar_t.
#pragma once

#include "moe_gemm/moe_consumer_sm90.cuh"
#include "moe_gemm/moe_producer_sm90.cuh"

struct MoeGemmSm90Params {
  TensorMap map_w;            // weight (E, R, K), or (E, K, R); box: 64 rows x 64 values of k
  TensorMap map_x;            // x, box: BOX_ROWS rows; used if `scatters`
  const scalar_t* x;          // (T, K), or (P, K) if `scatters`
  const int* order;           // (P,)
  const int* offsets;         // (E + 1,)
  const float* pair_weights;  // (P,), or null: 1
  const scalar_t* bias;       // (E, R), or null
  scalar_t* out;              // (P, R), or (P, R / 2) with an activation
  int num_experts, num_rows, k, top_k;
  int activation;  // a MoeActivation
  float alpha, limit;
  int scatters;  // rows of x are sorted, those of out in the order of pairs
  int is_early;  // the preceding kernel writes neither weight, bias nor the routing
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    moe_gemm_sm90(const __grid_constant__ MoeGemmSm90Params p) {
  extern __shared__ unsigned char smem_raw[];
  MoeShared& smem = *reinterpret_cast<MoeShared*>(smem_raw + (-smem_address(smem_raw) & 1023));
  const int warp_idx = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  const int num_gates = p.activation != kNone ? p.num_rows / 2 : 0;
  const int tile_rows = kPartsW * kMmaM / (num_gates > 0 ? 2 : 1);
  const int columns = num_gates > 0 ? num_gates : p.num_rows;
  const bool is_gathered = p.scatters == 0;
  const MoeScheduler scheduler{smem.offsets, smem.tiles, p.num_experts,
                               (columns + tile_rows - 1) / tile_rows, tile_rows};
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.map_w);
    tma_prefetch_map(&p.map_x);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&smem.full[i]), is_gathered ? 1 + kProducerThreads : 1);
      mbarrier_init(smem_address(&smem.empty[i]), kWarpgroups);
    }
    for (int i = 0; i < kRecords; ++i) {
      mbarrier_init(smem_address(&smem.record_full[i]), kRecordWriters);
      mbarrier_init(smem_address(&smem.record_empty[i]), kWarpgroups);
    }
    mbarrier_init_fence();
  }
  if (!p.is_early) pdl_wait();
  for (int e = threadIdx.x; e <= p.num_experts; e += kThreads) smem.offsets[e] = p.offsets[e];
  __syncthreads();
  if (warp_idx == 0)
    MoeScheduler::count_tiles(smem.offsets, smem.tiles, p.num_experts, scheduler.row_tiles);
  __syncthreads();
  // Producer and consumers diverge here and never reconverge, as setmaxnreg requires.
  if (warp_idx >= kConsumerThreads / 32) {
    if constexpr (kMovesRegisters) warpgroup_reg_dealloc<kProducerRegisters>();
    MoeLoader load{smem,           &p.map_w,     &p.map_x, p.x,     p.order,
                   p.pair_weights, !is_gathered, p.k,      p.top_k, num_gates};
    produce(smem, load, scheduler, p.is_early != 0);
  } else {
    if constexpr (kMovesRegisters) warpgroup_reg_alloc<kConsumerRegisters>();
    const MoeEpilogue epilogue{p.bias,     p.out,   !is_gathered,
                               p.num_rows, columns, MoeGate{p.activation, p.alpha, p.limit}};
    consume(epilogue, smem, scheduler.count(), (p.k + kSlabK - 1) / kSlabK);
  }
}
