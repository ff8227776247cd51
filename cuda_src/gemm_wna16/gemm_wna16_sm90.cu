// GEMM with a packed 4- to 8-bit weight on Hopper: TMA, mbarriers, wgmma.
//
//   out = activation(x weight^T + bias) + residual
//
// With num_gates the gate rows precede the up rows, and out = silu(gate) * up.
// Arguments: GemmWna16Sm90Params, below. The weight's layout: engine/weights/packing.py.
//
// Numerics: weights are rounded to scalar_t as in `dequantize` or nearly so
// (common/weight_fragments.cuh); with SCALES_SUMS codes are multiplied instead, and each
// group's sums scaled. Products on tensor cores (wgmma); sums, bias, activation and residual in
// float, one rounding at the end. Without SCALES_SUMS, k is summed in ascending steps of 16, for
// every M: from zero in each of the SPLITS or PARTS, whose sums are then added in ascending order.
// Parallelisation: a persistent CTA computes work tiles of kRows weight rows by kTokens rows of x.
// A producer thread fills a ring of stages by TMA. Consumer warpgroups decode codes to fragments in
// registers while wgmma multiplies those of the preceding step. The CTAs of a cluster split one
// tile's sum over k: they exchange partial sums through distributed shared memory, and each
// finishes some of the tokens.
// Mirror: engine/reference/gemm_wna16.py
#include "gemm_wna16/gemm_wna16_consumer_sm90.cuh"
#include "gemm_wna16/gemm_wna16_producer_sm90.cuh"

struct GemmWna16Sm90Params {
  TensorMap map_x;     // x (M, K), box: x_part rows
  TensorMap map_tail;  // x, box: tail_part rows, for the tile of the last rows
  // Tensor maps of the planes of a packed weight (N, K), as uint8. A box holds one stage of the
  // CTA's row tiles, or with num_gates one stage of half of them. Axes of data: (row tiles, K *
  // bits / 256, 256); of the others: (row tiles, slabs, bytes), a slab being one of k, a group or a
  // super-block.
  TensorMap map_data;
  TensorMap map_high;  // unused with 4 and 8 bits, but must be valid
  TensorMap map_scales;
  TensorMap map_supers;  // unused without super-blocks, but must be valid
  const scalar_t* bias;  // (N,), or null
  const void* residual;  // shape and dtype of out, rows residual_stride apart; may be out; or null
  int64_t residual_stride;  // elements
  void* out;                // (M, N), float if is_float, or scalar_t; gated: (M, N / 2), scalar_t
  int64_t out_stride;       // elements
  int m, n, slabs;          // number of 64-value slabs of k
  int x_part, tail_part;    // rows of x per tile; same for the tile of the last rows
  int num_gates;            // number of gate rows, a multiple of 16; 0: not gated
  int activation;           // an Activation
  int is_float;
  int is_vector;  // out and residual can be accessed eight elements at a time
  int is_early;   // the preceding kernel writes neither weight nor bias
};

extern "C" __global__ void __cluster_dims__(kSplits, 1, 1) __launch_bounds__(kThreads, kBlocks)
    gemm_wna16_sm90(const __grid_constant__ GemmWna16Sm90Params p) {
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
      const Loader load{smem,        &p.map_x,      &p.map_tail,   &p.map_data,
                        &p.map_high, &p.map_scales, &p.map_supers, p.num_gates / kTileRows,
                        p.m,         p.x_part,      p.tail_part,   first_k,
                        last_k};
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
    consume(consumer, epilogue, scheduler, p.m);
  }
}
