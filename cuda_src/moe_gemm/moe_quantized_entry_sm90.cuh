// Entry point of moe_gemm_sm90.cu for quantized weights.
#pragma once

#include "moe_gemm/moe_consumer_sm90.cuh"
#include "moe_gemm/moe_producer_quantized_sm90.cuh"

struct MoeGemmQuantizedSm90Params {
  // Packed: the planes of the matrix (E R, K), R a multiple of 16, box: 4 row tiles x a stage's
  // depth. Otherwise map_data is (E, R, K), box: 64 rows x 128 columns, and the other maps are
  // unused.
  TensorMap map_data, map_high, map_scales, map_supers;
  TensorMap map_x;            // x, box: BOX_ROWS rows; used with pair_weights
  const float* scales;        // if not packed: (E, blocks of rows, blocks of columns)
  const operand_t* x;         // (T, K), or (P, K) with pair_weights
  const float* x_scales;      // WEIGHT_KIND 3: (T, ceil(K / 128)), or (P, ceil(K / 128))
  const int* order;           // (P,)
  const int* offsets;         // (E + 1,)
  const float* pair_weights;  // (P,), or null
  const scalar_t* bias;       // (E, R), or null
  scalar_t* out;              // (P, R), or (P, R / 2) with an activation
  float* out_scales;          // QUANTIZES_OUT: (P, R / 256), and out is codes
  int num_experts, num_rows, k, top_k;
  int activation;  // a MoeActivation
  float alpha, limit;
  int is_early;  // the preceding kernel writes neither weight, bias nor the routing
};

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    moe_gemm_quantized_sm90(const __grid_constant__ MoeGemmQuantizedSm90Params p) {
  extern __shared__ unsigned char smem_raw[];
  MoeShared& smem = *reinterpret_cast<MoeShared*>(smem_raw + (-smem_address(smem_raw) & 1023));
  const int warp_idx = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  const int num_gates = p.activation != kNone ? p.num_rows / 2 : 0;
  const int tile_rows = kPartsW * kMmaM / (num_gates > 0 ? 2 : 1);
  const int columns = num_gates > 0 ? num_gates : p.num_rows;
  const bool is_gathered = p.pair_weights == nullptr;
  const MoeScheduler scheduler{smem.offsets, smem.tiles, p.num_experts,
                               (columns + tile_rows - 1) / tile_rows, tile_rows};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&smem.full[i]), 1 + kProducerThreads);
      mbarrier_init(smem_address(&smem.empty[i]), kConsumerThreads);
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
  const MoeWeights weights(p, num_gates);
  // Producer and consumers diverge here and never reconverge, as setmaxnreg requires.
  if (warp_idx >= kConsumerThreads / 32) {
    if constexpr (kMovesRegisters) warpgroup_reg_dealloc<kProducerRegisters>();
    MoeQuantizedLoader load{{smem, &p.map_data, &p.map_x, p.x, p.order, p.pair_weights,
                             !is_gathered, p.k, p.top_k, num_gates},
                            weights,
                            MoeRowScales(p)};
    produce(smem, load, scheduler, p.is_early != 0);
  } else {
    if constexpr (kMovesRegisters) warpgroup_reg_alloc<kConsumerRegisters>();
    const MoeEpilogue epilogue{p.bias,      p.out,   !is_gathered,
                               p.num_rows,  columns, MoeGate{p.activation, p.alpha, p.limit},
                               p.out_scales};
    consume(epilogue, smem, scheduler.count(), (p.k + kSlabK - 1) / kSlabK);
  }
}
