// GEMM with a packed 4- to 8-bit weight on Hopper: TMA, mbarriers, wgmma.
//
//   out = activation(x weight^T + bias) + residual
//
// With num_gates the gate rows precede the up rows, and out = silu(gate) * up.
// Arguments: GemmWna16Sm90Params, below. The weight's layout: engine/weights/packing.py.
//
// Numerics: weights are rounded to scalar_t as in `dequantize` or nearly so
// (common/weight_fragments_sm90.cuh); with SCALES_SUMS codes are multiplied instead, and each
// group's sums scaled. Products on tensor cores (wgmma); sums, bias, activation and residual in
// float, one rounding at the end. Without SCALES_SUMS, k is summed in ascending steps of 16, for
// every M: from zero in each of the SPLITS or PARTS, whose sums are then added in ascending order.
// Parallelisation: a persistent CTA computes work tiles of kRows weight rows by kTokens rows of x.
// A producer thread fills a ring of stages by TMA. Consumer warpgroups decode codes to fragments in
// registers while wgmma multiplies those of the preceding step. The CTAs of a cluster split one
// tile's sum over k: they exchange partial sums through distributed shared memory, and each
// finishes some of the tokens.
// Mirror: engine/reference/gemm_wna16.py
#include "gemm_wna16/gemm_wna16_body_sm90.cuh"

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
  void* out;                // (M, N), or (M, N / 2) gated; scalar_t, or float if is_float
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
  gemm_wna16_sm90(p, NoLowRank{});
}
