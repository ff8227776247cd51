// Few rows of x (decoding), 16-bit types: the weight is read once, through rings of shared memory.
//
// Every warp has its own ring of stages, filled by cp.async (skinny_weights.cuh), so no warp waits
// for another in the main loop. The next tile's weights arrive while a tile is finished; the first
// weights arrive while the preceding kernel, on which they do not depend, still runs. x stays in
// shared memory (skinny_x.cuh). Division of k and rows among warps: skinny_block.cuh.
#pragma once

#include "gemm/skinny_epilogue.cuh"
#include "gemm/skinny_mma.cuh"
#include "gemm/skinny_weights.cuh"
#include "gemm/skinny_x.cuh"

// The steps before the main loop: x to shared memory, and the operands of the first results.
template <typename Shape, bool kNorm>
struct SkinnyPrologue {
  SingleRow<Shape, kNorm> row;
  bool is_row, has_place;
  OutputPlace<Shape> place;
  OutputOperands early;

  __device__ __forceinline__ SkinnyPrologue(const Problem& p, const SkinnyBlock<Shape>& b,
                                            TransactionBarrier& barrier, RowSquares* squares)
      : is_row(row.fits(p, b)), place(p, b), early{} {
    has_place = place.is_inside(p, b.row0(b.tile));
    if (b.thread == 0) barrier.init();
    if constexpr (kNorm)  // clears the chunks that a short row does not fill
      for (int i = b.thread; i < Shape::kTokens * kSquareChunks; i += b.threads)
        squares[0].of[i] = 0.0f;
    if (is_row) row.load_norm(p, b);
    if (has_place) skinny_load_bias(p, b, place, early);
    skinny_pad_x(p, b);
    __syncthreads();
  }

  __device__ __forceinline__ void load_x(const Problem& p, const SkinnyBlock<Shape>& b,
                                         TransactionBarrier& barrier) {
    if (is_row)
      row.load_x(p, b);
    else
      skinny_load_x(p, b, barrier);
    if (has_place) skinny_load_residual(p, place, early);
  }

  // Returns when x is visible to all warps.
  __device__ __forceinline__ void finish_x(const Problem& p, const SkinnyBlock<Shape>& b,
                                           TransactionBarrier& barrier, RowSquares* squares) {
    if (is_row) {
      row.store(p, b, squares[0]);
    } else if constexpr (kNorm) {
      skinny_norm(p, b, barrier, squares);
    } else {
      barrier.wait();
      if constexpr (!kHasClusters) __syncthreads();
    }
  }
};

// SAFETY: with uses_pdl the preceding kernel may still run; it must not write the weight, the
// norm's weight or the bias.
template <typename Shape, bool kNorm>
__device__ __forceinline__ void skinny_ring(const SkinnyParams& params) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ TransactionBarrier barrier;
  __shared__ RowSquares smem_squares[kNorm ? Shape::kTokens : 1];
  pdl_trigger();
  const Problem p = problem_of_block<Shape>(make_problem(params));
  const SkinnyBlock<Shape> b(p, params, smem);
  WeightLoader<Shape> loader(p, b);
  SkinnyPrologue<Shape, kNorm> prologue(p, b, barrier, smem_squares);
  // While the preceding kernel may still run, only weights can be loaded. Otherwise x is loaded
  // first: if queued behind the weights it would wait for all of them.
  if (params.uses_pdl != 0) {
#pragma unroll 1
    for (int i = 0; i < Shape::kStages - 1; ++i) loader.load();
  }
  pdl_wait();
  prologue.load_x(p, b, barrier);
  if (params.uses_pdl == 0) {
#pragma unroll 1
    for (int i = 0; i < Shape::kStages - 1; ++i) loader.load();
  }
  prologue.finish_x(p, b, barrier, smem_squares);

  const int g = b.lane_idx / 4, t = b.lane_idx % 4;
  const RingTokens<Shape> x(p, b, g, t);
  int stage = 0, buffer = 0;
#pragma unroll 1
  for (int tile = b.tile; tile < b.num_tiles; tile += b.tile_step) {
    float acc[Shape::kSets][Shape::kTokenTiles][4] = {};
#pragma unroll 1
    for (int k = b.k_begin; k < b.k_end; k += kStepK) {
      cp_async_wait<Shape::kStages - 2>();
      __syncwarp();   // SAFETY: lanes see each other's copies and have read the previous stage,
      loader.load();  // which is refilled here
      multiply_stage<Shape>(acc, b.ring + stage * Shape::kStageBytes, g, t, x, (k - b.k_begin) * 2);
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
    float* sums = b.sums + (buffer * b.num_warps + b.warp_idx) * Shape::kSumFloats;
    skinny_store_sums<Shape>(acc, sums, g, t);
    // SAFETY: with two buffers, a warp overwrites a buffer only after the next tile's barrier, and
    // so after all reads of it; with one buffer a second barrier is needed.
    skinny_sync(b);
    skinny_finish(p, b, b.row0(tile), sums - threadIdx.y * Shape::kSumFloats, prologue.early,
                  tile == b.tile);
    if constexpr (Shape::kBuffers == 1)
      skinny_sync(b);
    else
      buffer ^= 1;
  }
  if (b.size > 1) cluster_sync(b.size);  // SAFETY: other blocks may still read this block's sums.
}
