// Few rows of x (decoding): the weight is read once, through rings of shared memory.
//
// Every warp has its own ring (gemm_wna16_few_rows_loader.cuh), so no warp waits for another in the
// main loop, and the first stages arrive while the preceding kernel still runs. x stays in shared
// memory. Division of k and rows among warps: gemm_wna16_few_rows_block.cuh.
#pragma once

#include "common/weight_product.cuh"
#include "gemm_wna16/gemm_wna16_few_rows_loader.cuh"
#include "gemm_wna16/gemm_wna16_few_rows_rounded.cuh"
#include "gemm_wna16/gemm_wna16_few_rows_x.cuh"
#include "gemm_wna16/gemm_wna16_group_columns.cuh"

#if ENGINE_DTYPE != 0

#ifdef ROUNDS_WEIGHTS
template <typename Shape>
using Product = RoundedProduct<Shape>;
#else
template <typename Shape, bool kHasColumns = kHasGroupColumns<Shape::kTokens>>
struct Product : StageProduct<Shape> {};
template <typename Shape>
struct Product<Shape, true> : GroupColumnsProduct<Shape> {};
#endif

// Epilogue operands of an element of out.
struct OutputOperands {
  float bias, up_bias, residual;
};

// An element of out that a thread finishes: row tile z of a work tile, or z and z + 1 if gated.
struct OutputPlace {
  int z, token, row, column;  // row within the row tile; column of out

  __device__ __forceinline__ static int tiles(const FewRowsBlock& b) {
    return b.gate_tiles > 0 ? blockDim.z / 2 : blockDim.z;
  }
  // Moves to element `index` of the work tile; returns false if it does not exist.
  __device__ __forceinline__ bool set(const FewRowsParams& p, const FewRowsBlock& b, int work_tile,
                                      int index) {
    const bool is_gated = b.gate_tiles > 0;
    row = index % kTileRows;
    z = index / kTileRows, token = 0;
    if (p.m > 1) token = z / tiles(b), z %= tiles(b);
    if (is_gated) z *= 2;
    column = b.row_tile(work_tile, z) * kTileRows + row;
    return token < p.m && z < static_cast<int>(blockDim.z) && column < (is_gated ? p.n / 2 : p.n);
  }
  __device__ __forceinline__ void load_bias(const FewRowsParams& p, const FewRowsBlock& b,
                                            OutputOperands& o) const {
    o.bias = o.up_bias = 0.0f;
    if (p.bias == nullptr) return;
    o.bias = to_float(p.bias[column]);
    if (b.gate_tiles > 0) o.up_bias = to_float(p.bias[column + p.n / 2]);
  }
  __device__ __forceinline__ void load_residual(const FewRowsParams& p, OutputOperands& o) const {
    o.residual = 0.0f;
    if (p.residual == nullptr) return;
    const int64_t at = token * p.residual_stride + column;
    o.residual = p.is_float ? static_cast<const float*>(p.residual)[at]
                            : to_float(static_cast<const scalar_t*>(p.residual)[at]);
  }
  __device__ __forceinline__ void store(const FewRowsParams& p, float y) const {
    const int64_t at = token * p.out_stride + column;
    if (p.is_float)
      static_cast<float*>(p.out)[at] = y;
    else
      static_cast<scalar_t*>(p.out)[at] = from_float<scalar_t>(y);
  }
};

// Returns this thread's first element of a work tile. A cluster's threads take elements in turn.
__device__ __forceinline__ int first_output(const FewRowsBlock& b) {
  return b.rank * b.threads + b.thread;
}

// Sums an element over all parts, in order; `from` points to the first part's sum.
template <typename Shape>
__device__ __forceinline__ float sum_of_parts(const FewRowsBlock& b, const float* from) {
  float sum = 0.0f;
  if constexpr (Shape::kTokens == 1) {
#pragma unroll 4
    for (int part = 0; part < blockDim.y; ++part) sum += from[part * Shape::kSumFloats];
  } else {
#pragma unroll 1
    for (int rank = 0; rank < b.size; ++rank)
#pragma unroll 4
      for (int part = 0; part < blockDim.y; ++part)
        sum += ld_shared_cluster(from + part * Shape::kSumFloats, rank, b.size);
  }
  return sum;
}

// Adds the parts' sums in order and writes the work tile's elements. `early` holds the operands of
// this thread's first element, or is null.
template <typename Shape>
__device__ __forceinline__ void finish_work_tile(const FewRowsParams& p, const FewRowsBlock& b,
                                                 int work_tile, const float* sums,
                                                 const OutputOperands* early) {
  const int count = OutputPlace::tiles(b) * kTileRows * p.m;
#pragma unroll 1
  for (int index = first_output(b); index < count; index += b.threads * b.size, early = nullptr) {
    OutputPlace place;
    if (!place.set(p, b, work_tile, index)) continue;
    OutputOperands o;
    if (early != nullptr) {
      o = *early;
    } else {
      place.load_bias(p, b, o);
      place.load_residual(p, o);
    }
    const float* from =
        sums + place.z * blockDim.y * Shape::kSumFloats + place.token * Shape::kPitch + place.row;
    const float sum = sum_of_parts<Shape>(b, from);
    if (b.gate_tiles == 0) {
      place.store(p, activate(p.activation, sum + o.bias) + o.residual);
      continue;
    }
    from += blockDim.y * Shape::kSumFloats;
    const float up = sum_of_parts<Shape>(b, from);
    place.store(p, silu(sum + o.bias) * (up + o.up_bias));
  }
}

// SAFETY: with uses_pdl the preceding kernel may still run; it must not write the weight, the
// norm's weight or the bias.
template <int kTokens, bool kNorm>
__device__ __forceinline__ void few_rows(const FewRowsParams& p) {
  using Shape = FewRowsShape<kTokens>;
  constexpr int kTokenTiles = Shape::kTokenTiles;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ NormShared smem_norm;
  // Loaded early to hide the latency, and kept in shared memory because registers are scarce.
  __shared__ OutputOperands smem_early[512];
  pdl_trigger();
  const FewRowsBlock b(p, smem, kTokens);
  if (b.first_work_tile() >= p.num_work_tiles) {  // surplus block: only occupies a multiprocessor
    pdl_wait();
    return;
  }
  StageLoader loader(p, b);
  {
    OutputOperands early{};
    SingleRow<kNorm> row;
    const bool is_row = kTokens == 1 && row.fits(p, b);
    const auto load_parameters = [&] {
      OutputPlace place;
      if (place.set(p, b, b.first_work_tile(), first_output(b))) place.load_bias(p, b, early);
      if (is_row) row.load_norm(p, b);
      loader.fill(0, p.early_stages);
    };
    if (p.uses_pdl != 0) load_parameters();
    pdl_wait();
    if (is_row)
      row.load_x(p, b);
    else
      copy_rows(p, b);
    OutputPlace place;
    if (place.set(p, b, b.first_work_tile(), first_output(b))) place.load_residual(p, early);
    if (p.uses_pdl == 0) load_parameters();
    loader.fill(p.early_stages, p.num_stages);
    if (is_row)
      row.store(p, b, smem_norm);
    else
      finish_rows<kNorm, kTokens>(p, b, p.num_stages - (p.uses_pdl != 0 ? p.early_stages : 0),
                                  smem_norm);
    smem_early[b.thread] = early;
    __syncthreads();
  }

  // Addresses of the rows of x that this lane passes to ldmatrix; nonexistent tokens use the last
  // row.
  uint32_t x_rows[kTokenTiles];
#pragma unroll
  for (int i = 0; i < kTokenTiles; ++i) {
    int own = min(i * 8 + b.lane_idx % 8, p.m - 1) * b.x_pitch + b.lane_idx / 8 * 16;
    if constexpr (kHasGroupColumns<kTokens>)
      own = GroupColumnsProduct<Shape>::x_offset(b.lane_idx, b.x_pitch, p.m);
    x_rows[i] = smem_address(b.x) + own + (b.stage_begin * kStageColumns - b.x_begin) * 2;
  }
  constexpr int kSumRows = kHasGroupColumns<kTokens> ? kTokens : 1;  // sums of x per group
  float* sums = b.sums;
  const unsigned char* stage_at = b.ring;
#pragma unroll 1
  for (int work_tile = b.first_work_tile(); work_tile < p.num_work_tiles;
       work_tile += b.work_tile_step()) {
    Product<Shape> product;
    product.clear();
    uint32_t x_at[kTokenTiles];
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) x_at[i] = x_rows[i];
    const float* x_sums =
        b.x_sums + (b.stage_begin * kStageColumns - b.x_begin) / kGroup * kSumRows;
#pragma unroll 1
    for (int stage = b.stage_begin; stage < b.stage_end; ++stage) {
      wait_for_oldest(p.num_stages);
      __syncwarp();  // SAFETY: the lanes see each other's copies.
      if constexpr (kRoundsWeights) {
        const int first = stage * kStageTiles;
        product.multiply(stage_at, b.tile_begin - first, b.tile_end - first, x_at, b.lane_idx);
      } else {
        product.multiply(stage_at, x_sums, x_at, b.lane_idx);
      }
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) x_at[i] += kStageColumns * 2;
      x_sums += kStageGroups * kSumRows;
      __syncwarp();  // SAFETY: all lanes have read the stage before it is refilled.
      loader.load();
      stage_at += kStageBytes;
      if (stage_at == b.ring + p.num_stages * kStageBytes) stage_at = b.ring;
    }
    product.store(sums + b.warp_idx * Shape::kSumFloats, b.lane_idx / 4, b.lane_idx % 4);
    // SAFETY: a warp overwrites one of the two buffers only after the next work tile's barrier, and
    // so after all reads of it.
    cluster_sync(b.size);
    finish_work_tile<Shape>(p, b, work_tile, sums,
                            work_tile == b.first_work_tile() ? &smem_early[b.thread] : nullptr);
    const int buffer = b.num_warps * Shape::kSumFloats;
    sums = sums == b.sums ? sums + buffer : b.sums;
  }
  if (b.size > 1) cluster_sync(b.size);  // SAFETY: others may still read this block's sums.
}

// Entry points of an op, without or with a norm before the product. Blocks of 16 rows have fewer
// warps, with more registers each.
#define ENGINE_FEW_ROWS_ENTRY(name, tokens, threads, norm) \
  extern "C" __global__ void __launch_bounds__(threads, 1) \
      name(const __grid_constant__ FewRowsParams p) {      \
    few_rows<tokens, norm>(p);                             \
  }
#if ENGINE_COLUMN_TOKENS == 4
#define ENGINE_COLUMN_ENTRIES(op, norm)           \
  ENGINE_FEW_ROWS_ENTRY(op##_few_2, 2, 512, norm) \
  ENGINE_FEW_ROWS_ENTRY(op##_few_4, 4, 512, norm)
#elif ENGINE_COLUMN_TOKENS == 2
#define ENGINE_COLUMN_ENTRIES(op, norm) ENGINE_FEW_ROWS_ENTRY(op##_few_2, 2, 512, norm)
#else
#define ENGINE_COLUMN_ENTRIES(op, norm)
#endif
#define ENGINE_FEW_ROWS_ENTRIES(op, norm)         \
  ENGINE_FEW_ROWS_ENTRY(op##_few_1, 1, 512, norm) \
  ENGINE_COLUMN_ENTRIES(op, norm)                 \
  ENGINE_FEW_ROWS_ENTRY(op##_few_8, 8, 512, norm) \
  ENGINE_FEW_ROWS_ENTRY(op##_few_16, 16, 384, norm)

#endif
