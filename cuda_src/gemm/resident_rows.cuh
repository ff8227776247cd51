// Two to eight rows of x, 16-bit types, with register-resident weights: gemv.cuh for more rows.
//
// All weights have arrived by the time the preceding kernel ends, and the blocks take little shared
// memory, so those of the next kernel load theirs beside them. x is copied to shared memory. The
// sums equal those of skinny_ring.cuh bit for bit if the parts have the same length.
#pragma once

#include "gemm/gemv.cuh"
#include "gemm/skinny_epilogue.cuh"

// Zero-fills rows of x past their end, where the weights are zeros too. A barrier must follow.
template <typename Shape>
__device__ __forceinline__ void resident_pad_x(const Problem& p, const SkinnyBlock<Shape>& b) {
  using V = Vec<scalar_t, kVec>;
  const int vectors = (b.slice_end - b.slice_begin) / kVec;
  const int all = static_cast<int>(blockDim.y) * b.part_k / kVec;
#pragma unroll 1
  for (int row = 0; row < p.m; ++row)
    for (int i = vectors + b.thread; i < all; i += b.threads)
      store_vec(b.x_row(row) + i * kVec, V{});
}

// SAFETY: with uses_pdl the preceding kernel may still run; it must not write the weight or the
// bias.
template <typename Shape>
__device__ __forceinline__ void resident_rows(const SkinnyParams& params) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ TransactionBarrier barrier;
  pdl_trigger();
  const Problem p = make_problem(params);
  const SkinnyBlock<Shape> b(p, params, smem);
  const int g = b.lane_idx / 4, t = b.lane_idx % 4, row0 = b.row0(b.tile);
  ResidentWeights weights(p, b, row0);
  if (b.thread == 0) barrier.init();
  OutputPlace<Shape> place(p, b);
  const bool has_place = place.is_inside(p, row0);
  OutputOperands early = {};
  if (has_place) skinny_load_bias(p, b, place, early);
  resident_pad_x(p, b);
  __syncthreads();
  if constexpr (kSumsInParts) weights.order();
  pdl_wait();
  skinny_load_x(p, b, barrier);
  if (has_place) skinny_load_residual(p, place, early);
  barrier.wait();
  if constexpr (!kHasClusters) __syncthreads();
  const TokenFragments<Shape> x(p, b, g, t);
  float acc[Shape::kSets][1][4] = {};
#pragma unroll
  for (int s = 0; s < kResidentSteps; ++s)
    multiply_fragments<Shape>(acc, weights.step[s], x, s * kStepK * 2);
  float* sums = b.sums + b.warp_idx * Shape::kSumFloats;
  skinny_store_sums<Shape>(acc, sums, g, t);
  skinny_sync(b);
  skinny_finish(p, b, row0, sums - threadIdx.y * Shape::kSumFloats, early, true);
}
