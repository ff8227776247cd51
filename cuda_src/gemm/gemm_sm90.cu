// GEMM with a fused epilogue on Hopper: TMA, mbarriers, wgmma.
//
//   out = activation(x weight^T + bias) + residual
//
// With "silu_and_mul" the weight rows alternate between gate and up in groups of eight
// (epilogue.cuh), and out has N / 2 columns. With num_gates all gate rows precede the up rows in
// memory, and TMA interleaves them on the way to shared memory: the axes of map_w are (k, 8 rows,
// gate and up, groups of 8 rows). Arguments: GemmSm90Params, below.
//
// Numerics: products on tensor cores (wgmma), sums, bias, activation and residual in float, one
// rounding at the end. The order of summation depends only on the module's tile and on K; with
// SUMS_IN_PARTS on K alone, and the product is rounded before a residual is added.
// Parallelisation: a persistent CTA computes work tiles of kTileM x kTileN one after another. One
// producer thread fills a ring of stages by TMA, kDepth slabs of 64 values of k at a time; it loads
// the first weights before the preceding kernel has ended. One to three consumer warpgroups
// multiply. The CTAs of a cluster compute kClusterM x kClusterN neighbouring tiles: each loads part
// of its row's x tile and of its column's weight tile, and multicasts both. kClusterK CTAs split
// one tile's sum over k: they exchange partial sums through distributed shared memory, and each
// finishes some of the columns. Swapped tiles, for up to 32 rows, multiply weight x^T: kTileM is
// then the number of wgmma's columns (gemm_config_sm90.cuh, gemm_swapped_sm90.cuh).
// Mirror: engine/reference/gemm.py
#include "gemm/gemm_consumer_sm90.cuh"
#include "gemm/gemm_producer_sm90.cuh"

// Elements per access of out and residual; OutVector in engine/kernels/gemm/sm90.py.
enum OutVector { kOneElement = 0, kFourElements = 1, kEightElements = 2 };

struct GemmSm90Params {
  TensorMap map_x;     // x (M, K), box: x_part rows; address and row stride: multiples of 16 bytes
  TensorMap map_tail;  // x, box: tail_part rows, for the tile of the last rows
  TensorMap map_w;     // weight (N, K), K a multiple of 8
  // out, box: 16 rows x 64 columns; used if kStores, out_vector is kEightElements and residual is
  // null.
  TensorMap map_out;
  const scalar_t* bias;  // (N,), or null
  const void* residual;  // shape and dtype of out, rows residual_stride apart; may be out; or null
  int64_t residual_stride;  // elements
  void* out;                // (M, N), or (M, N / 2) gated; scalar_t, or float if is_float
  int64_t out_stride;       // elements
  int m, n, k;
  int band;               // rows of super-tiles per band (TileScheduler)
  int x_part, tail_part;  // rows of x per CTA and tile; same for the tile of the last rows
  int stages;             // stages of the ring, for tiles of up to 64 rows
  int early;              // stages of the weight to load before the preceding kernel has ended
  int uses_pdl;           // the preceding kernel may still run; it writes neither weight nor bias
  int num_gates;          // number of gate rows if they all precede the up rows; else 0
  int activation;         // an Activation
  int is_float;
  int out_vector;  // an OutVector
  void* peers;     // with SENDS: PeerGroup of this rank; else unused, like the next two
  int sent_rows;   // Sending::rows
  int segment;     // Sending::segment
  int part;        // stages of a part of k; with SUMS_IN_PARTS
};

extern "C" __global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_sm90(const __grid_constant__ GemmSm90Params p) {
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
                          p.out_stride, p.activation, p.is_float != 0, p.out_vector != kOneElement,
                          p.num_gates};
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
    consume(pipeline, scheduler, smem, epilogue, p.out_vector > kFourElements, &p.map_out,
            kWarmsUp && p.uses_pdl != 0, p.sent_rows, p.part);
  }
  // SAFETY: other CTAs still arrive on this one's mbarriers, so it must not exit before them. (With
  // kClusterK alone it has already waited for all their sums.)
  if (kClusterM * kClusterN > 1) cluster_sync_relaxed();
}
