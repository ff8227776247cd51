// Matrix product with a fused epilogue on Hopper: TMA, mbarriers, wgmma.
//
//   out = activation(x weight^T + bias) + residual
//
// With "silu_and_mul" the weight's rows are gate and up in turn, eight of each (gemm.cu), and out
// has N / 2 columns. With num_gates they lie one after the other in memory, and get their turns on
// the way to shared memory: map_w has axes (k, 8 rows, gate and up, groups of 8 rows).
//
//   x         (M, K) half or bfloat16   by TMA: address and row stride multiples of 16 bytes
//   weight    (N, K) half or bfloat16   by TMA: K a multiple of 8
//   bias      (N,)   scalar_t           or null
//   residual  (M, N) scalar_t or float  as out; rows residual_stride apart; or null; may be out
//   out       (M, N) scalar_t or float  rows out_stride apart
//   map_tail  x by boxes of tail_part rows, for the last rows' tile; map_x's have x_part
//   map_out   out by boxes of 16 rows and 64 columns, where it has 16 bits, is_vector is 2 and
//             there is no residual (compiled with STORES); else any map
//   stages    of the ring, for tiles of 64 rows
//   uses_pdl  the kernel in front may still run, and writes neither weight nor bias: some of the
//             weight is loaded early, and small tiles go through their instructions once
//   num_gates rows of gate, if the weight and the bias have all of these first; else 0
//
// Numerics: products on tensor cores (wgmma), sums, bias, activation and residual in float, one
// rounding at the end. The order of summation is fixed by the module's macros and K alone.
// Parallelisation: a persistent block makes tiles of TILE_M x TILE_N one after another. One thread
// asks TMA for tiles of x and weight, a stage of 64 * DEPTH of k at a time, as many stages ahead as
// fit; the first weights before the kernel in front has ended. One to three warpgroups multiply.
// Blocks of a cluster make neighbouring tiles, CLUSTER_M x CLUSTER_N, and share what they read: each
// loads a part of a row's x tile or a column's weight tile and multicasts it. CLUSTER_K blocks
// share one tile's sum over k: they swap their sums through distributed shared memory and each
// finishes some of the columns.
// Mirror: engine/reference/gemm.py
#include "gemm/epilogue_sm90.cuh"

extern "C" __global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_sm90(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_tail,
              const __grid_constant__ TensorMap map_w, const __grid_constant__ TensorMap map_out,
              const scalar_t* bias, const void* residual, int64_t residual_stride, void* out,
              int64_t out_stride, int m, int n, int k, int group, int x_part, int tail_part,
              int stages, int uses_pdl, int num_gates, int activation, int is_float,
              int is_vector) {
  pdl_trigger();
  extern __shared__ unsigned char smem_raw[];
  unsigned char* smem = align_smem(smem_raw);
  const Pipeline pipeline(smem_address(smem), stages, (x_part * kClusterN + 7) / 8 * 8);
  const Schedule schedule(m, n, k, group);
  const Loading loading{x_part, tail_part, uses_pdl != 0, num_gates > 0};
  const Loader loader(pipeline, schedule, &map_x, &map_tail, &map_w, loading);
  // The same for all lanes, and said so.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  if (warp == kProducer / 32 && elect_one()) {
    tma_prefetch_map(&map_w);
    tma_prefetch_map(&map_x);
    tma_prefetch_map(&map_tail);
    if (kStores) tma_prefetch_map(&map_out);
    const int rows = m - schedule.tile(schedule.first()).x;  // the only tile where k is shared
    pipeline.init(min(TILE_M, (rows + 15) / 16 * 16));
    if (kLoadsAlone) load_early(pipeline, schedule, loader);
  }
  if (kClusterSize > 1)
    cluster_sync_relaxed();  // the fence is part of init
  else
    __syncthreads();
  const Epilogue epilogue{bias,       residual,   out,           residual_stride,
                          out_stride, activation, is_float != 0, is_vector != 0,
                          num_gates};
  // One branch for each role: setmaxnreg wants it so.
  if (warp < kFirstConsumer / 32 || warp >= (kFirstConsumer + kConsumers) / 32) {
    if constexpr (kMovesRegisters) warpgroup_reg_dealloc<kProducerRegisters>();
    if (warp == kProducer / 32 && elect_one()) {
      if (!kLoadsAlone) load_early(pipeline, schedule, loader);
      produce(pipeline, schedule, loader);
    }
  } else {
    if constexpr (kMovesRegisters) warpgroup_reg_alloc<kConsumerRegisters>();
    consume(pipeline, schedule, smem, epilogue, is_vector > 1, &map_out, kWarmsUp && uses_pdl != 0);
  }
  // SAFETY: a block that ended would take its mbarriers away from the others' arrivals. (Sums from
  // other blocks it has waited for.)
  if (kClusterM * kClusterN > 1) cluster_sync_relaxed();
}
