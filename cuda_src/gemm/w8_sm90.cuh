// Kernel of gemm_fp8_sm90.cu and gemm_int8_sm90.cu: gemm_sm90.cu with 8-bit operands.
#pragma once

#include "gemm/gemm_producer_sm90.cuh"
#if SWAPPED
#include "gemm/w8_swapped_sm90.cuh"
#else
#include "gemm/w8_consumer_sm90.cuh"
#endif

// Fields without a comment: see GemmSm90Params.
struct GemmW8Sm90Params {
  TensorMap map_x;     // x (M, K) codes, contiguous; K is a multiple of 16
  TensorMap map_tail;  // x, box: tail_part rows
  TensorMap map_w;     // weight (N, K) codes
  TensorMap map_out;
  const float* x_scales;       // (M,), or (M, ceil(K / 128)) with groups
  const float* weight_scales;  // (N,), or (ceil(N / 128), ceil(K / 128)) with blocks
  const scalar_t* bias;        // (N,), or null
  const void* residual;
  int64_t residual_stride;
  void* out;
  int64_t out_stride;
  int m, n, k;
  int band;
  int x_part, tail_part;
  int stages;
  int early;      // stages of the weight to load before the preceding kernel has ended
  int uses_pdl;   // the preceding kernel may still run; it writes no model parameter
  int num_gates;  // a multiple of 64 with blocks
  int activation;
  int is_float;
  int out_vector;  // elements per access of out and residual: 0 one, 1 four, 2 eight
  void* peers;
  int sent_rows, segment;
};

__device__ __forceinline__ void gemm_w8_sm90(const GemmW8Sm90Params& p) {
  pdl_trigger();
  extern __shared__ unsigned char smem_raw[];
  unsigned char* smem = align_smem(smem_raw);
  const Pipeline pipeline(smem_address(smem), p.stages, (p.x_part * kClusterN + 7) / 8 * 8);
  const TileScheduler scheduler(p.m, p.n, p.k, p.band);
  const Loading loading{p.x_part, p.tail_part, p.early, p.uses_pdl != 0, p.num_gates > 0};
  const Loader loader(pipeline, scheduler, &p.map_x, &p.map_tail, &p.map_w, loading);
  // The shuffle tells ptxas that it is warp-uniform.
  const int warp_idx = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  if (warp_idx == kProducer / 32 && elect_one()) {
    tma_prefetch_map(&p.map_w);
    tma_prefetch_map(&p.map_x);
    tma_prefetch_map(&p.map_tail);
    if (kStores) tma_prefetch_map(&p.map_out);
    const int rows = p.m - scheduler.tile(scheduler.first()).x;  // with split k, a CTA's only tile
    pipeline.init(min(kTileM, (rows + 15) / 16 * 16));
    if (kLoadsAlone) load_early(pipeline, scheduler, loader);
  }
  if (kClusterSize == 1 || kSends) __syncthreads();  // `stored` is not an mbarrier
  if (kClusterSize > 1) cluster_sync_relaxed();      // init includes the fence for mbarriers
  const Epilogue epilogue{p.bias,       p.residual,   p.out,           p.residual_stride,
                          p.out_stride, p.activation, p.is_float != 0, p.out_vector != 0,
                          p.num_gates};
  const W8Scales scales{p.x_scales, p.weight_scales, (p.k + kScaleBlock - 1) / kScaleBlock};
  // Producer and consumers diverge here and never reconverge, as setmaxnreg requires.
  if (warp_idx < kFirstConsumer / 32 || warp_idx >= (kFirstConsumer + kConsumerThreads) / 32) {
    if constexpr (kMovesRegisters) warpgroup_reg_dealloc<kProducerRegisters>();
    if (warp_idx == kProducer / 32 && elect_one()) {
      if (!kLoadsAlone) load_early(pipeline, scheduler, loader);
      produce(pipeline, scheduler, loader);
    }
    if constexpr (kSends) {
      if (warp_idx > kProducer / 32 && p.sent_rows > 0)
        send(pipeline, scheduler, static_cast<const Words*>(p.out),
             Sending{static_cast<PeerGroup*>(p.peers), p.sent_rows, p.segment}, threadIdx.x - 32);
    }
  } else {
    if constexpr (kMovesRegisters) warpgroup_reg_alloc<kConsumerRegisters>();
    consume_codes(pipeline, scheduler, smem, epilogue, scales, p.out_vector > 1, &p.map_out,
                  kWarmsUp && p.uses_pdl != 0, p.sent_rows);
  }
  // SAFETY: other CTAs still arrive on this one's mbarriers, so it must not exit before them. (With
  // kClusterK alone it has already waited for all their sums.)
  if (kClusterM * kClusterN > 1) cluster_sync_relaxed();
}

#define ENGINE_GEMM_W8_SM90(name)                                                                \
  extern "C" __global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1) \
      name(const __grid_constant__ GemmW8Sm90Params p) {                                         \
    gemm_w8_sm90(p);                                                                             \
  }
