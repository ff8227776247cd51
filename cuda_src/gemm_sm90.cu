// Matrix product with a fused epilogue on Hopper: TMA, mbarriers, wgmma.
//
//   out = activation(x weight^T + bias) + residual
//
//   x         (M, K) half or bfloat16   by TMA: address and row stride multiples of 16 bytes
//   weight    (N, K) half or bfloat16   by TMA: K a multiple of 8
//   bias      (N,)   scalar_t           or null
//   residual  (M, N) scalar_t or float  as out; rows residual_stride apart; or null; may be out
//   out       (M, N) scalar_t or float  rows out_stride apart
//
// Numerics: products on tensor cores (wgmma), sums, bias, activation and residual in float, one
// rounding at the end. The order of summation is fixed by the module's macros and K alone.
// Parallelisation: a persistent block makes tiles of TILE_M x TILE_N one after another. One thread
// asks TMA for tiles of x and weight, STAGES ahead; one to three warpgroups multiply them. Blocks
// of a cluster make neighbouring tiles, CLUSTER_M x CLUSTER_N, and share what they read: each
// loads a part of a row's x tile or a column's weight tile and multicasts it. CLUSTER_K blocks
// share one tile's sum over k: they swap their sums through distributed shared memory and each
// finishes some of the columns.
// Mirror: engine/reference/gemm.py
#include "common/gemm_sm90_epilogue.cuh"

extern "C" __global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_sm90(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_w,
              const scalar_t* bias, const void* residual, int64_t residual_stride, void* out,
              int64_t out_stride, int m, int n, int k, int group, int activation, int is_float,
              int is_vector) {
  let_next_kernel_start();
  extern __shared__ unsigned char smem_raw[];
  unsigned char* smem = align_smem(smem_raw);
  const Pipeline pipeline(smem_address(smem));
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map_x);
    tma_prefetch_map(&map_w);
    pipeline.init();
  }
  if (kClusterSize > 1) cluster_sync_relaxed();  // the fence is part of init
  else __syncthreads();
  wait_for_last_kernel();  // what it wrote may be our operand; what it reads may be our result

  const Schedule schedule(m, n, k, group);
  const Epilogue epilogue{bias,       residual,   out,           residual_stride,
                          out_stride, activation, is_float != 0, is_vector != 0};
  // One branch for each role: setmaxnreg wants it so.
  if (threadIdx.x < 128) {
    if constexpr (kWarpgroups > 1) registers_give_up<kProducerRegisters>();
    if (threadIdx.x == 0) produce(pipeline, schedule, &map_x, &map_w);
  } else {
    if constexpr (kWarpgroups > 1) registers_take<kConsumerRegisters>();
    consume(pipeline, schedule, smem, epilogue, is_vector > 1);
  }
  // SAFETY: a block that ended would take its mbarriers away from the others' arrivals. (Sums from
  // other blocks it has waited for.)
  if (kClusterM * kClusterN > 1) cluster_sync_relaxed();
}
