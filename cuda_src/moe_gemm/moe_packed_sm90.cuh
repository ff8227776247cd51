// A stage of packed weights: the planes of its row tiles (engine/weights/packing.py), its loads,
// and the decoding of a lane's codes to wgmma's A operand.
#pragma once

#include "common/weight_fragments.cuh"

constexpr int kStageK = kDepth * kSlabK;
constexpr int kRowTiles = kPartsW * 4;  // row tiles (16 rows) per stage
constexpr int kStageGroups = kStageK > kGroup ? kStageK / kGroup : 1;
static_assert(kStageK % kGroup == 0 || kGroup % kStageK == 0, "a stage has whole groups or a part");
static_assert(kSuperBlock == 0 || kSuperBlock % kStageK == 0, "a stage lies in one super-block");
static_assert(kTileColumns == kSlabK, "a slab is a tile wide");

// The planes are stored one after another, each row tile by row tile. TMA loads all row tiles of an
// m-tile together.
constexpr int kTileData = kDepth * kDataBytes, kTileHigh = kDepth * kHighBytes;
constexpr int kTileScales = kStageGroups * kScaleTileBytes;
constexpr int kHighPlane = kRowTiles * kTileData;
constexpr int kScalePlane = kHighPlane + kRowTiles * kTileHigh;
constexpr int kSuperPlane = kScalePlane + kRowTiles * kTileScales;
constexpr int kStageW = (kSuperPlane + kRowTiles * kSuperTileBytes + 1023) / 1024 * 1024;
constexpr int kMmaTileRows = kMmaM / kTileRows;  // row tiles per m-tile
constexpr int kMapRow = 256;                     // bytes per row of map_data
static_assert(kMmaTileRows * kTileScales % 128 == 0 && kMmaTileRows * kSuperTileBytes % 128 == 0,
              "where TMA writes");

struct MoeWeights {
  const TensorMap *map_data, *map_high, *map_scales, *map_supers;
  int num_rows, num_gates;  // rows per expert; num_gates 0: no gate

  template <typename Params>
  __device__ __forceinline__ MoeWeights(const Params& p, int num_gates)
      : map_data(&p.map_data),
        map_high(&p.map_high),
        map_scales(&p.map_scales),
        map_supers(&p.map_supers),
        num_rows(p.num_rows),
        num_gates(num_gates) {}

  // Number of bytes that `load` announces. It includes bytes outside the planes, written as zeros.
  // Rows of another expert may be loaded: their sums are dropped.
  __device__ __forceinline__ int bytes(int) const {
    return kRowTiles * (kTileData + kTileHigh + kTileScales + kSuperTileBytes);
  }

  // Called by one warp.
  __device__ __forceinline__ void load(unsigned char* stage, int slab, int, int expert, int row,
                                       unsigned full) const {
    if (!elect_one()) return;
    const unsigned to = smem_address(stage);
    const int first = expert * (num_rows / kTileRows);
#pragma unroll
    for (int part = 0; part < kPartsW; ++part) {
      const int from =
          row + (num_gates > 0 ? part / 2 * kMmaM + part % 2 * num_gates : part * kMmaM);
      const int tile = first + from / kTileRows, local = part * kMmaTileRows;
      tma_load_3d(to + local * kTileData, map_data, 0, slab * (kDataBytes / kMapRow), tile, full);
      if constexpr (kHighBytes > 0)
        tma_load_3d(to + kHighPlane + local * kTileHigh, map_high, 0, slab, tile, full);
      tma_load_3d(to + kScalePlane + local * kTileScales, map_scales, 0, slab * kSlabK / kGroup,
                  tile, full);
      if constexpr (kSuperBlock > 0)
        tma_load_3d(to + kSuperPlane + local * kSuperTileBytes, map_supers, 0,
                    slab * kSlabK / (kSuperBlock > 0 ? kSuperBlock : 1), tile, full);
    }
  }
  __device__ __forceinline__ void load_scales(unsigned char*, float*, int, int, int) const {}
};

// Whether the scale and the factor that converts e2m1 codes to numbers can merge into one number,
// 2^(e - 1). This requires an e8m0 exponent e of at most 128.
constexpr bool kMergesScale = kIsE2m1 && kScaleType == kE8m0Scale && !kIsHalf && !kIsPaired;
static_assert(!kMergesScale || kGroup == 32, "a slab has two groups");

// Decodes a lane's fragments of a slab.
struct MoeDecoder {
  static constexpr float kDivisor = kWeightDivisor;  // fragments hold weights / kDivisor
  const unsigned char* stage;
  int first_tile, lane_idx;  // the warp's row tile in its first m-tile
  bool is_mixed;             // that tile holds 8 rows of gate and 8 of up (kMixesRows)
  TileWords words[kMmaTiles];
  RowScales scales[kMmaTiles];
  uint32_t exponents[kMmaTiles];  // kMergesScale only: exponents of rows g and g + 8, two groups
  bool merges;                    // kMergesScale only: whether all exponents of the warp allow it

  __device__ __forceinline__ MoeDecoder(int warpgroup, bool is_gated)
      : first_tile(warpgroup * kMmaTiles * 4 + threadIdx.x / kWarpSize % 4),
        lane_idx(threadIdx.x % kWarpSize),
        is_mixed(kMixesRows && is_gated) {}

  __device__ __forceinline__ void begin_stage(const unsigned char* smem) { stage = smem; }
  __device__ __forceinline__ void begin_slab(int d) {
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) {
      const auto load = [&](int tile) {
        TileWords own;
        own.load(stage + tile * kTileData + d * kDataBytes,
                 stage + kHighPlane + tile * kTileHigh + d * kHighBytes, lane_idx);
        return own;
      };
      const int tile = first_tile + j * 4;
      words[j] =
          is_mixed ? mix(load(tile / 2), load(kRowTiles / 2 + tile / 2), tile % 2) : load(tile);
    }
    if constexpr (kMergesScale) {
      uint32_t any = 0;
#pragma unroll
      for (int j = 0; j < kMmaTiles; ++j) {
        exponents[j] = scale_words(j, 2 * d).x | scale_words(j, 2 * d + 1).x << 16;
        any |= exponents[j];
      }
      merges = !__any_sync(~0u, any & 0x80808080u);
    }
  }

  // Returns the stored scales of a group of the stage.
  __device__ __forceinline__ uint2 scale_words(int j, int group) const {
    return small_words<kScaleBytes>(stage + kScalePlane + group * kScaleTileBytes, j, kTileScales);
  }
  __device__ __forceinline__ SuperFactors super_factors(int j) const {
    if constexpr (kSuperBlock == 0) return SuperFactors();
    return SuperFactors(small_words<kSuperBytes>(stage + kSuperPlane, j, kSuperTileBytes));
  }

  // Decodes the fragments of products kFirst to kFirst + kCount - 1 of slab d, ordered by step,
  // then by m-tile. Calls must follow that order.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void decode(int d, uint32_t (&a)[kCount][4]) {
    if constexpr (kMergesScale) {
      if (merges) return decode_merged<kFirst>(a);
    }
    decode_scaled<kFirst>(d, a);
  }

 private:
  // Loads kBytes for this lane's rows of m-tile j from one of the stage's planes.
  template <int kBytes>
  __device__ __forceinline__ uint2 small_words(const unsigned char* plane, int j,
                                               int tile_bytes) const {
    const unsigned char* from = plane + lane_idx / 4 * kBytes;
    const int tile = first_tile + j * 4;
    if (!is_mixed) return load_small<kBytes>(from + tile * tile_bytes);
    const unsigned char* gate = from + tile / 2 * tile_bytes;
    return mix<kBytes>(load_small<kBytes>(gate),
                       load_small<kBytes>(gate + kRowTiles / 2 * tile_bytes), tile % 2);
  }

  template <int kProduct, int kAt = 0, int kCount>
  __device__ __forceinline__ void decode_scaled(int d, uint32_t (&a)[kCount][4]) {
    constexpr int kStep = kProduct / kMmaTiles, kTile = kProduct % kMmaTiles;
    if constexpr (kStep * 16 % kGroup == 0 || kMergesScale) {
      const int group = kGroup < kStageK ? (d * kSlabK + kStep * 16) / kGroup : 0;
      scales[kTile].set(scale_words(kTile, group), super_factors(kTile));
    }
    decode_weights<kStep, false>(words[kTile], scales[kTile], a[kAt]);
    if constexpr (kAt + 1 < kCount) decode_scaled<kProduct + 1, kAt + 1>(d, a);
  }

  template <int kProduct, int kAt = 0, int kCount>
  __device__ __forceinline__ void decode_merged(uint32_t (&a)[kCount][4]) const {
    constexpr int kStep = kProduct / kMmaTiles, kTile = kProduct % kMmaTiles;
    const uint32_t own = exponents[kTile] >> kStep / 2 * 16;
    const uint32_t low = ((own & 255) + 126) * 0x00800080u;
    const uint32_t high = ((own >> 8 & 255) + 126) * 0x00800080u;
    a[kAt][0] = multiply_pair(small_e2m1<kStep, 0>(words[kTile]), low);
    a[kAt][1] = multiply_pair(small_e2m1<kStep, 1>(words[kTile]), high);
    a[kAt][2] = multiply_pair(small_e2m1<kStep, 2>(words[kTile]), low);
    a[kAt][3] = multiply_pair(small_e2m1<kStep, 3>(words[kTile]), high);
    if constexpr (kAt + 1 < kCount) decode_merged<kProduct + 1, kAt + 1>(a);
  }
};
