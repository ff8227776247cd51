// A warp's ring of stages, filled by cp.async.
#pragma once

#include "common/cp_async.cuh"
#include "gemm_wna16/few_rows_block.cuh"

// Loads the stages of a warp in the order it multiplies them. Beyond the end of k it writes zeros:
// codes of 0 with scales of 0.
struct StageLoader {
  // Scales and supers take one copy: this lane's chunk of either.
  static constexpr int kScaleChunks = kStageScales / 16;
  static constexpr int kSuperChunks = kStageSupers * kSuperTileBytes / 16;
  static_assert(kScaleChunks + kSuperChunks <= kWarpSize, "a copy each");

  const FewRowsParams& p;
  const FewRowsBlock& b;
  const unsigned char *data, *high, *small;  // of the next stage, from this lane on
  int unit, stage;
  int partial_stage;      // the one that the end of k cuts, or -1
  uint32_t to, ring_end;  // of this lane
  int small_step;

  __device__ __forceinline__ StageLoader(const FewRowsParams& p, const FewRowsBlock& b)
      : p(p), b(b), unit(blockIdx.x), to(smem_address(b.ring) + b.lane_idx * 16) {
    ring_end = to + p.num_stages * kStageBytes;
    partial_stage = b.k_tiles % kStageTiles == 0 ? -1 : b.k_tiles / kStageTiles;
    small_step = b.lane_idx < kScaleChunks ? kStageScales : kStageSupers * kSuperTileBytes;
    start_unit();
  }

  __device__ __forceinline__ void start_unit() {
    stage = b.stage_begin;
    if (stage >= b.stage_end) unit = p.num_units;
    if (unit >= p.num_units) return;
    const int64_t tile = min(b.row_tile(unit, threadIdx.z), b.row_tiles - 1);
    const int64_t first = tile * b.k_tiles + stage * kStageTiles;
    data = p.data + first * kDataBytes + b.lane_idx * 16;
    high = p.high + first * kHighBytes + b.lane_idx * 16;
    if (b.lane_idx < kScaleChunks)
      small =
          p.scales + (tile * p.groups + stage * kStageGroups) * kScaleTileBytes + b.lane_idx * 16;
    else
      small = p.supers + (tile * p.num_supers + stage * kStageSupers) * kSuperTileBytes +
              (b.lane_idx - kScaleChunks) * 16;
  }

  template <int kTo, int kFrom>
  __device__ __forceinline__ void copy(const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %2], [%1 + %3], 16;\n" ::"r"(to),
                 "l"(from), "n"(kTo), "n"(kFrom)
                 : "memory");
  }
  // Copies 16 bytes, or zeros.
  __device__ __forceinline__ void copy_if(bool valid, int offset, const unsigned char* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to + offset),
                 "l"(valid ? from : p.data), "r"(valid ? 16 : 0)
                 : "memory");
  }

  __device__ __forceinline__ void load_whole() {
    copy<0, 0>(data);
    copy<512, 512>(data);
    copy<1024, 1024>(data);
    copy<1536, 1536>(data);
    if constexpr (kStageHigh >= 512) copy<kHighAt, 0>(high);
    if constexpr (kStageHigh >= 1024) copy<kHighAt + 512, 512>(high);
    if (b.lane_idx < kScaleChunks + kSuperChunks) copy<kScalesAt, 0>(small);
  }

  __device__ __forceinline__ void load_partial() {
    const int tiles = b.k_tiles - stage * kStageTiles;  // that are left
#pragma unroll
    for (int i = 0; i < kStageData / 512; ++i)
      copy_if(i * 512 / kDataBytes < tiles, i * 512, data + i * 512);
#pragma unroll
    for (int i = 0; i < kStageHigh / 512; ++i)
      copy_if((i * 512 + b.lane_idx * 16) / max(kHighBytes, 1) < tiles, kHighAt + i * 512,
              high + i * 512);
    if (b.lane_idx < kScaleChunks + kSuperChunks) {
      const int group = stage * kStageGroups + b.lane_idx * 16 / kScaleTileBytes;
      const bool valid = b.lane_idx < kScaleChunks ? group < p.groups : stage < p.num_supers;
      copy_if(valid, kScalesAt, small);
    }
  }

  // Always commits a group of copies, an empty one at the end: the wait counts groups.
  __device__ __forceinline__ void load() {
    if (unit < p.num_units) {
      if (stage != partial_stage)
        load_whole();
      else
        load_partial();
      data += kStageData, small += small_step;
      if constexpr (kHighBytes > 0) high += kStageHigh;
      if (++stage == b.stage_end) unit += gridDim.x, start_unit();
    }
    cp_async_commit();
    to += kStageBytes;
    if (to == ring_end) to -= p.num_stages * kStageBytes;
  }
};
