// A stage of packed weights (engine/quantization/packing.py): the planes of its row tiles, how they
// are loaded, and how a lane makes wgmma's first operand of them.
#pragma once

#include "common/weight_fragments_sm90.cuh"

constexpr int kStageK = kDepth * kSlabK;
constexpr int kRowTiles = kPartsW * 4;  // of 16 rows
constexpr int kStageGroups = kStageK > kGroup ? kStageK / kGroup : 1;
static_assert(kStageK % kGroup == 0 || kGroup % kStageK == 0, "a stage has whole groups or a part");
static_assert(kSuperBlock == 0 || kSuperBlock % kStageK == 0, "a stage lies in one super-block");
static_assert(kRowTiles <= kWarpSize && kTileColumns == kSlabK, "a lane copies for one row tile");

// The planes follow each other, each with its row tiles one after another.
constexpr int kTileData = kDepth * kDataBytes, kTileHigh = kDepth * kHighBytes;
constexpr int kTileScales = kStageGroups * kScaleTileBytes;
constexpr int kHighPlane = kRowTiles * kTileData;
constexpr int kScalePlane = kHighPlane + kRowTiles * kTileHigh;
constexpr int kSuperPlane = kScalePlane + kRowTiles * kTileScales;
constexpr int kStageW = (kSuperPlane + kRowTiles * kSuperTileBytes + 1023) / 1024 * 1024;

struct MoeWeights {
  PackedWeight planes;
  int num_rows, num_gates;    // of an expert; num_gates 0: no gate
  int row_tiles;              // of all experts
  int slabs, groups, supers;  // of a row

  template <typename Params>
  __device__ __forceinline__ MoeWeights(const Params& p, int num_gates)
      : planes{p.data, p.high, p.scales, p.supers},
        num_rows(p.num_rows),
        num_gates(num_gates),
        row_tiles(p.num_experts * (p.num_rows / kTileRows)),
        slabs((p.k + kSlabK - 1) / kSlabK),
        groups(p.groups),
        supers(p.num_supers) {}

  // A row tile of the stage. Rows that do not exist are replaced by others: their sums are dropped.
  __device__ __forceinline__ int row_tile(int expert, int row, int local) const {
    const int part = local / 4;
    row += num_gates > 0 ? part / 2 * kMmaM + part % 2 * num_gates : part * kMmaM;
    return min(expert * (num_rows / kTileRows) + row / kTileRows + local % 4, row_tiles - 1);
  }

  // Bytes that `load` announces.
  __device__ __forceinline__ int bytes(int depth) const {
    return kRowTiles * depth * (kDataBytes + kHighBytes);
  }

  // By one warp.
  __device__ __forceinline__ void load(unsigned char* stage, int slab, int depth, int expert,
                                       int row, unsigned full) const {
    const int local = threadIdx.x % kWarpSize;
    if (local >= kRowTiles) return;
    const int64_t first = static_cast<int64_t>(row_tile(expert, row, local)) * slabs + slab;
    bulk_load(smem_address(stage) + local * kTileData, planes.data + first * kDataBytes,
              depth * kDataBytes, full);
    if constexpr (kHighBytes > 0)
      bulk_load(smem_address(stage) + kHighPlane + local * kTileHigh,
                planes.high + first * kHighBytes, depth * kHighBytes, full);
  }

  // By all threads of the producer: what is too small for bulk copies.
  __device__ __forceinline__ void load_scales(unsigned char* stage, float*, int slab, int expert,
                                              int row) const {
    constexpr int kChunks = kTileScales / 16;
    const int thread = threadIdx.x % kProducerThreads, group = slab * kSlabK / kGroup;
    const int count = min(kStageGroups, groups - group) * (kScaleTileBytes / 16);
#pragma unroll 1  // registers are scarce here
    for (int i = thread; i < kRowTiles * kChunks; i += kProducerThreads) {
      const int local = i / kChunks, chunk = i % kChunks;
      if (chunk >= count) continue;
      const int64_t first = static_cast<int64_t>(row_tile(expert, row, local)) * groups + group;
      cp_async_16(stage + kScalePlane + i * 16,
                  planes.scales + first * kScaleTileBytes + chunk * 16);
    }
    if constexpr (kSuperBlock > 0) {
      constexpr int kSuperChunks = kSuperBlock > 0 ? kSuperTileBytes / 16 : 1;
      static_assert(kRowTiles * kSuperChunks <= kProducerThreads, "one a thread");
      if (thread >= kRowTiles * kSuperChunks) return;
      const int64_t first =
          static_cast<int64_t>(row_tile(expert, row, thread / kSuperChunks)) * supers +
          slab * kSlabK / (kSuperBlock > 0 ? kSuperBlock : 1);
      cp_async_16(stage + kSuperPlane + thread * 16,
                  planes.supers + first * kSuperTileBytes + thread % kSuperChunks * 16);
    }
  }
};

// A lane's fragments of a slab.
struct MoeDecoder {
  const unsigned char* stage;
  int first_tile, lane_idx;  // the warp's row tile of its first m-tile
  TileWords words[kMmaTiles];
  RowScales scales[kMmaTiles];

  __device__ __forceinline__ explicit MoeDecoder(int warpgroup)
      : first_tile(warpgroup * kMmaTiles * 4 + threadIdx.x / kWarpSize % 4),
        lane_idx(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void begin_stage(const unsigned char* smem) { stage = smem; }
  __device__ __forceinline__ void begin_slab(int d) {
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) {
      const int tile = first_tile + j * 4;
      words[j].load(stage + tile * kTileData + d * kDataBytes,
                    stage + kHighPlane + tile * kTileHigh + d * kHighBytes, lane_idx);
    }
  }

  __device__ __forceinline__ GroupScales super_factors(int tile, int g) const {
    if constexpr (kSuperBlock == 0) return GroupScales();
    return GroupScales::of_super(
        load_small<kSuperBytes>(stage + kSuperPlane + tile * kSuperTileBytes + g * kSuperBytes));
  }

  // The fragments of step kStep; steps come in order.
  template <int kStep>
  __device__ __forceinline__ void load_scales(int d) {
    if constexpr (kStep * 16 % kGroup == 0) {
      const int group = kGroup < kStageK ? (d * kSlabK + kStep * 16) / kGroup : 0;
#pragma unroll
      for (int j = 0; j < kMmaTiles; ++j) {
        const int tile = first_tile + j * 4, g = lane_idx / 4;
        scales[j].set(load_small<kScaleBytes>(stage + kScalePlane + tile * kTileScales +
                                              group * kScaleTileBytes + g * kScaleBytes),
                      super_factors(tile, g));
      }
    }
  }
  template <int kStep>
  __device__ __forceinline__ void decode(int j, int, uint32_t (&a)[4]) const {
    decode_weights<kStep, false>(words[j], scales[j], a);
  }
};
