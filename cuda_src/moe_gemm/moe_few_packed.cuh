// Loads and multiplies stages of a packed weight in the kernels for few tokens.
#pragma once

#include "common/weight_product.cuh"
#include "common/weight_stage.cuh"
#if E2M1
#include "moe_gemm/moe_few_e2m1.cuh"
#endif
#include "moe_gemm/moe_few_x.cuh"

#if ENGINE_DTYPE != 0

constexpr int kXPitch = kStageColumns * 2 + 16;  // bytes per row of x, padded: no bank conflicts

struct MoeFewWeight : StageCopier<MoeFewParams> {
  __device__ __forceinline__ void load_stage(uint32_t stage_at) {
    to = stage_at + lane_idx * 16;
    StageCopier<MoeFewParams>::load_stage();
  }

  __device__ __forceinline__ MoeFewWeight(const MoeFewParams& p, int lane_idx)
      : StageCopier<MoeFewParams>{p, lane_idx, num_tiles(p)} {}

  __device__ __forceinline__ static int num_tiles(const MoeFewParams& p) {
    return (p.k + kTileColumns - 1) / kTileColumns;
  }
  __device__ __forceinline__ static int num_stages(const MoeFewParams& p) {
    return (num_tiles(p) + kStageTiles - 1) / kStageTiles;
  }
  // Moves to stage `first` of 16 rows; rows past the last one repeat it.
  __device__ __forceinline__ void start(int expert, int row, int first, int) {
    const int tiles = p.num_rows / kTileRows;
    go_to(expert * tiles + min(row / kTileRows, tiles - 1), first);
  }
};

template <int kTokens, bool kIsE2m1One = kIsE2m1 && kTokens == 1>
struct MoeFewProduct {
  // The sum of x over a group is computed as a product with ones, even for one token.
  using Shape = FewRowsShape<kSumsX ? 8 : kTokens>;
  static constexpr bool kScalesX = false, kPairsX = false;
  static constexpr int kPeak = 0;
  StageProduct<Shape> product;

  __device__ __forceinline__ void clear() { product.clear(); }

  // Adds the products of a stage.
  __device__ __forceinline__ void multiply(const unsigned char* stage, const MoeStageX& x,
                                           int lane_idx) {
    const uint32_t x_at[1] = {smem_address(x.rows) + min(lane_idx % 8, x.count - 1) * x.pitch +
                              lane_idx / 8 * 16};
    product.multiply(stage, nullptr, x_at, lane_idx);
  }
  __device__ __forceinline__ void store(float* sums, int lane_idx) {
    product.store(sums, lane_idx / 4, lane_idx % 4);
  }
};

#if E2M1
template <>
struct MoeFewProduct<1, true> : MoeE2m1Product {};
#endif

#endif
