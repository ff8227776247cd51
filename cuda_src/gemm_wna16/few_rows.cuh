// Few rows of x (decoding): the weight is read once, through rings of shared memory.
//
// Every warp has a ring of its own (few_rows_loader.cuh), so that no warp waits for another one in
// the main loop, and the first stages arrive while the preceding kernel still runs. x stays in
// shared memory. How k and rows are shared: few_rows_block.cuh.
#pragma once

#include "gemm_wna16/few_rows_loader.cuh"
#include "gemm_wna16/few_rows_mma.cuh"
#include "gemm_wna16/few_rows_x.cuh"

#if ENGINE_DTYPE != 0

// An element of out that a thread finishes: of row tile z (gated: of z and z + 1) of a unit.
struct OutputPlace {
  int z, token, row, column;  // row of the tile's 16; column of out
  float bias, up_bias, residual;

  // Element `index` of the unit; false if it does not exist.
  __device__ __forceinline__ bool set(const FewRowsParams& p, const FewRowsBlock& b, int unit,
                                      int index) {
    const bool is_gated = b.gate_tiles > 0;
    const int tiles = is_gated ? blockDim.z / 2 : blockDim.z;
    row = index % kTileRows;
    z = index / kTileRows % tiles * (is_gated ? 2 : 1);
    token = index / (kTileRows * tiles);
    const int tile = b.row_tile(unit, z);
    column = tile * kTileRows + row;
    return token < p.m && column < (is_gated ? p.n / 2 : p.n);
  }
  __device__ __forceinline__ void load_bias(const FewRowsParams& p, const FewRowsBlock& b) {
    bias = up_bias = 0.0f;
    if (p.bias == nullptr) return;
    bias = to_float(p.bias[column]);
    if (b.gate_tiles > 0) up_bias = to_float(p.bias[column + p.n / 2]);
  }
  __device__ __forceinline__ void load_residual(const FewRowsParams& p) {
    residual = 0.0f;
    if (p.residual == nullptr) return;
    const int64_t at = token * p.residual_stride + column;
    residual = p.is_float ? static_cast<const float*>(p.residual)[at]
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

// Adds the parts' sums in their order and writes the unit's elements. `early` is this thread's first
// element of its first unit.
template <typename Shape>
__device__ __forceinline__ void finish_unit(const FewRowsParams& p, const FewRowsBlock& b, int unit,
                                            const float* sums, const OutputPlace& early,
                                            bool is_first) {
  const int tiles = b.gate_tiles > 0 ? blockDim.z / 2 : blockDim.z;
  const int count = tiles * kTileRows * p.m;
#pragma unroll 1
  for (int index = b.thread; index < count; index += b.threads, is_first = false) {
    OutputPlace o = early;
    if (!is_first) {
      if (!o.set(p, b, unit, index)) continue;
      o.load_bias(p, b);
      o.load_residual(p);
    } else if (!o.set(p, b, unit, index)) {
      continue;
    }
    const float* from =
        sums + o.z * blockDim.y * Shape::kSumFloats + o.token * Shape::kPitch + o.row;
    float sum = 0.0f, up = 0.0f;
#pragma unroll 4
    for (int part = 0; part < blockDim.y; ++part) sum += from[part * Shape::kSumFloats];
    if (b.gate_tiles == 0) {
      o.store(p, activate(p.activation, sum + o.bias) + o.residual);
      continue;
    }
    from += blockDim.y * Shape::kSumFloats;
#pragma unroll 4
    for (int part = 0; part < blockDim.y; ++part) up += from[part * Shape::kSumFloats];
    o.store(p, silu(sum + o.bias) * (up + o.up_bias));
  }
}

// SAFETY: with uses_pdl the preceding kernel may still run; it must not write the weight, the
// norm's weight or the bias.
template <int kTokenTiles>
__device__ __forceinline__ void few_rows(const FewRowsParams& p) {
  using Shape = FewRowsShape<kTokenTiles>;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ NormShared smem_norm;
  pdl_trigger();
  const FewRowsBlock b(p, smem);
  StageLoader loader(p, b);
  OutputPlace early{};
  const bool has_place = early.set(p, b, blockIdx.x, b.thread);
  if (p.uses_pdl != 0) {
    if (has_place) early.load_bias(p, b);
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) loader.load();
  }
  pdl_wait();
  if (has_place) early.load_residual(p);
  if (p.uses_pdl == 0) {
    if (has_place) early.load_bias(p, b);
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) loader.load();
  }
  load_x(p, b, smem_norm);

  // The rows of x that this lane passes to ldmatrix; for tokens that do not exist, the last one's.
  uint32_t x_rows[kTokenTiles];
#pragma unroll
  for (int i = 0; i < kTokenTiles; ++i) {
    const int token = min(i * 8 + b.lane_idx % 8, p.m - 1);
    x_rows[i] = smem_address(b.x) + token * b.x_pitch + b.lane_idx / 8 * 16;
  }
  const int g = b.lane_idx / 4, t = b.lane_idx % 4;
  int place = 0, buffer = 0;
#pragma unroll 1
  for (int unit = blockIdx.x; unit < p.num_units; unit += gridDim.x) {
    StageProduct<kTokenTiles> product;
    product.clear();
#pragma unroll 1
    for (int stage = b.stage_begin; stage < b.stage_end; ++stage) {
      cp_async_wait<kStages - 2>();
      __syncwarp();   // SAFETY: the lanes see each other's copies, and have read the stage before,
      loader.load();  // which is filled again
      uint32_t x_at[kTokenTiles];
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) x_at[i] = x_rows[i] + stage * (kStageColumns * 2);
      product.multiply(b.ring + place * kStageBytes, x_at, b.lane_idx);
      place = place + 1 >= p.num_stages ? 0 : place + 1;
    }
    float* sums = b.sums + buffer * b.num_warps * Shape::kSumFloats;
    float* own = sums + b.warp_idx * Shape::kSumFloats + t * 2 * Shape::kPitch + g;
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      float* to = own + i * 8 * Shape::kPitch;
      to[0] = product.total[i][0], to[Shape::kPitch] = product.total[i][1];
      to[8] = product.total[i][2], to[Shape::kPitch + 8] = product.total[i][3];
    }
    // SAFETY: of two buffers a warp overwrites one only after the next unit's barrier, which comes
    // after all reads of it.
    __syncthreads();
    finish_unit<Shape>(p, b, unit, sums, early, unit == blockIdx.x && has_place);
    buffer ^= 1;
  }
}

#endif
