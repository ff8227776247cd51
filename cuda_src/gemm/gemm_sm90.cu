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
// rounding at the end. The order of summation depends only on the module's tile and on K.
// Parallelisation: a persistent CTA computes work tiles of kTileM x kTileN one after another. One
// producer thread fills a ring of stages by TMA, kDepth slabs of 64 values of k at a time; it loads
// the first weights before the preceding kernel has ended. One to three consumer warpgroups
// multiply. The CTAs of a cluster compute kClusterM x kClusterN neighbouring tiles: each loads part
// of its row's x tile and of its column's weight tile, and multicasts both. kClusterK CTAs split
// one tile's sum over k: they exchange partial sums through distributed shared memory, and each
// finishes some of the columns.
// Mirror: engine/reference/gemm.py
#include "gemm/gemm_body_sm90.cuh"

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
  int stages;             // stages of the ring, for tiles of 64 rows
  int uses_pdl;           // the preceding kernel may still run; it writes neither weight nor bias
  int num_gates;          // number of gate rows if they all precede the up rows; else 0
  int activation;         // an Activation
  int is_float;
  int out_vector;  // an OutVector
};

extern "C" __global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_sm90(const __grid_constant__ GemmSm90Params p) {
  gemm_sm90(p, NoLowRank{});
}
