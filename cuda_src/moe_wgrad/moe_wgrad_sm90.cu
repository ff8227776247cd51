// Gradient of a grouped GEMM with respect to its matrices, on Hopper: TMA, mbarriers, wgmma.
//
//   out[e] = sum over i of dy[i]^T x[i],   i in [offsets[e], offsets[e + 1])
//
// One operand has rows sorted by expert; row i of the other one is token order[i] / top_k. Experts
// without rows get zeros. Arguments: MoeWgradSm90Params in moe_wgrad_config_sm90.cuh.
//
// Numerics: products on tensor cores, float sums in ascending steps of 16 rows, one rounding.
// Parallelisation: persistent CTAs iterate over tiles of 128 columns of the gathered operand (A) by
// 256 of the sorted one (B). wgmma reads both as they lie in memory, with rows along the sum. A
// producer warpgroup fills the ring of stages; two consumer warpgroups multiply 64 columns of A
// each, and store by TMA while they multiply the next tile. Two CTAs form a cluster and share B:
// alone, each would read from L2 more than L2 can deliver.
// Mirror: engine/reference/moe_wgrad.py
#include "common/pdl.cuh"
#include "moe_wgrad/moe_wgrad_consumer_sm90.cuh"
#include "moe_wgrad/moe_wgrad_producer_sm90.cuh"

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    moe_wgrad_sm90(const __grid_constant__ MoeWgradSm90Params p) {
  extern __shared__ unsigned char smem_raw[];
  WgradShared& smem = *reinterpret_cast<WgradShared*>(smem_raw + (-smem_address(smem_raw) & 1023));
  pdl_trigger();
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.map_sorted);
    tma_prefetch_map(&p.map_out);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&smem.full[i]), 1 + kProducerThreads);
      mbarrier_init(smem_address(&smem.empty[i]), kWarpgroups * kCluster);
    }
    mbarrier_init_fence();
  }
  cluster_sync_relaxed();  // init includes the fence
  pdl_wait();
  // Producer and consumers diverge here and never reconverge, as setmaxnreg requires.
  if (threadIdx.x >= kWarpgroups * 128) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    produce(smem, p);
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    consume(smem, p);
  }
  // SAFETY: the other CTA still loads into this one, and arrives on it. A relaxed barrier would not
  // wait for its arrivals.
  cluster_sync();
}
