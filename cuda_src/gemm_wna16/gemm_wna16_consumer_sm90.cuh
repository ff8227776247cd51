// Consumers of gemm_wna16_sm90.cu: they decode weights to fragments in registers, multiply these by
// the rows of x in shared memory with wgmma, and write the sums in the epilogue.
//
// The weight is wgmma's A and the tokens are its B: sums are (weight rows, tokens).
#pragma once

#include "common/pipeline_state.cuh"
#include "gemm_wna16/gemm_wna16_epilogue_sm90.cuh"
#include "common/weight_fragments.cuh"
#include "common/wgmma_weights.cuh"

using Sums = float[kMmaTiles][kTokens / 2];
constexpr int kHalfSteps = kSteps / 2;
// Fragments of half a slab. wgmma reads them while the next half is decoded.
using Fragments = uint32_t[kHalfSteps][kMmaTiles][4];

// A lane's codes and scales of the slab that is being decoded.
struct SlabWords {
  TileWords words[kMmaTiles];
  RowScales scales[kMmaTiles];
  SuperFactors factors[kMmaTiles];  // factors of the stage's super-block
};

struct Consumer {
  Shared& smem;
  int slabs;            // number of slabs along k
  int first_k, last_k;  // range of stages along k
  int warpgroup, warp_idx, lane_idx;
  bool is_gated;

  // Returns the row tile of this warp's m-tile `mma`. In a gated product the tiles of gate precede
  // those of up. A mixed tile holds 8 rows of gate and 8 of up, from row 8 (tile % 2) of their row
  // tile `tile / 2` on.
  __device__ __forceinline__ int row_tile(int mma) const {
    return (warpgroup * kMmaTiles + mma) * 4 + warp_idx % 4;
  }
  __device__ __forceinline__ bool mixes_tiles() const { return kStoresHalves && is_gated; }

  // SAFETY: every lane releases a stage, because it has read the weights by ordinary loads; one
  // arrival per warp would suffice, but compute-sanitizer then reports races.
  __device__ __forceinline__ void release(int stage) const {
    mbarrier_arrive(smem_address(&smem.empty[stage]));
  }

  // Loads kBytes for this lane's rows of a row tile from one of a stage's arrays.
  template <int kBytes>
  __device__ __forceinline__ uint2 small_words(const unsigned char* array, int tile,
                                               int tile_bytes) const {
    const unsigned char* from = array + lane_idx / 4 * kBytes;
    if (!mixes_tiles()) return load_small<kBytes>(from + tile * tile_bytes);
    const unsigned char* gate = from + tile / 2 * tile_bytes;
    return mix<kBytes>(load_small<kBytes>(gate),
                       load_small<kBytes>(gate + kRowTiles / 2 * tile_bytes), tile % 2);
  }

  // Returns the stored scales of the group at step `step` of slab `d` of a stage.
  __device__ __forceinline__ uint2 group_words(int stage, int tile, int d, int step) const {
    const int group = kGroup < kStageK ? (d * kSlabK + step * 16) / kGroup : 0;
    return small_words<kScaleBytes>(smem.weight[stage] + kAtScales + group * kScaleTileBytes, tile,
                                    kStageGroups * kScaleTileBytes);
  }
  __device__ __forceinline__ SuperFactors super_factors(int stage, int tile) const {
    if constexpr (kSuperBlock == 0) return SuperFactors();
    return SuperFactors(
        small_words<kSuperBytes>(smem.weight[stage] + kAtSuper, tile, kSuperTileBytes));
  }

  __device__ __forceinline__ TileWords load_words(int stage, int tile, int d) const {
    const auto load = [&](int from) {
      const int place = from * kDepth + d;
      TileWords words;
      words.load(smem.weight[stage] + place * kDataBytes,
                 smem.weight[stage] + kAtHigh + place * kHighBytes, lane_idx);
      return words;
    };
    if (!mixes_tiles()) return load(tile);
    return mix(load(tile / 2), load(kRowTiles / 2 + tile / 2), tile % 2);
  }

  // Decodes half kHalf of slab `d` of a stage to fragments; half 0 loads the slab's words.
  template <int kHalf>
  __device__ __forceinline__ void decode_half(int stage, int d, SlabWords& slab,
                                              Fragments& a) const {
    constexpr int kFirst = kHalf * kHalfSteps;
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) {
      const int tile = row_tile(j);
      if constexpr (kHalf == 0) {
        slab.words[j] = load_words(stage, tile, d);
        if (d == 0) slab.factors[j] = super_factors(stage, tile);
      }
      RowScales& scales = slab.scales[j];
      const auto load = [&](int step) {
        const uint2 own = group_words(stage, tile, d, step);
        if constexpr (kScalesSums)
          scales.set_offsets(own);
        else
          scales.set(own, slab.factors[j]);
      };
      if (kHalf == 0 || kGroup <= 32) load(kFirst);
      decode_weights<kFirst, kScalesSums>(slab.words[j], scales, a[0][j]);
      if (kGroup <= 16) load(kFirst + 1);
      decode_weights<kFirst + 1, kScalesSums>(slab.words[j], scales, a[1][j]);
    }
  }

  // Starts the products of half `half` of slab `d` of a stage.
  __device__ __forceinline__ void start(int stage, int d, int half, bool is_first,
                                        const Fragments& a, Sums& acc) const {
    const uint64_t b = wgmma_descriptor(smem_address(smem.x[0]) + stage * kStageX + d * kSlabX);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHalfSteps; ++step)
#pragma unroll
      for (int j = 0; j < kMmaTiles; ++j)
        wgmma_weights<kTokens>(acc[j], a[step][j], b + (half * kHalfSteps + step) * 2,
                               !is_first || step > 0);
    wgmma_commit();
  }

  // Loads the scales of the group that contains slab `d` of a stage.
  __device__ __forceinline__ void load_scales(int stage, int d,
                                              float (&scales)[kMmaTiles][2]) const {
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) {
      const int tile = row_tile(j);
      const GroupScales own =
          group_scales(group_words(stage, tile, d, 0), super_factors(stage, tile));
      scales[j][0] = own.scale[0], scales[j][1] = own.scale[1];
    }
  }

  // Adds a group's sums, multiplied by its scales.
  __device__ __forceinline__ void add_group(const float (&scales)[kMmaTiles][2], Sums& group,
                                            Sums& acc) const {
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) {
      wgmma_pin(group[j]);
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i)
        acc[j][i] = fmaf(scales[j][i / 2 % 2], group[j][i], acc[j][i]);
    }
  }

  // Returns the first stage of part `index` of k.
  __device__ __forceinline__ int part_begin(int index) const {
    return (slabs + kPartSlabs - 1) / kPartSlabs * index / kParts * (kPartSlabs / kDepth);
  }
  __device__ __forceinline__ void add_part(Sums& part, Sums& acc) const {
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) {
      wgmma_pin(part[j]);
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) acc[j][i] += part[j][i];
    }
  }

  __device__ __forceinline__ void wait_full(const PipelineState<kStages>& state) const {
    mbarrier_wait(smem_address(&smem.full[state.stage]), state.phase);
  }

  // Sums this CTA's share of k, which is not empty. Half a slab is decoded while wgmma multiplies
  // the half before it.
  __device__ __forceinline__ void multiply(PipelineState<kStages>& state, Sums& acc) const {
    constexpr bool kHasPart = kScalesSums || kParts > 1;
    state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
    Sums part;                                       // sums of a group, or of a part of k
    if constexpr (kHasPart) {
#pragma unroll
      for (int j = 0; j < kMmaTiles; ++j)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) acc[j][i] = 0.0f;
    }
    Sums& sums = kHasPart ? part : acc;
    int part_idx = 0, begin = first_k;  // index and first stage of the current part of k
    int end = kParts > 1 ? part_begin(1) : last_k;
    SlabWords slab;
    Fragments first, second;
    wait_full(state);
    decode_half<0>(state.stage, 0, slab, first);
#pragma unroll 1
    for (int k = first_k; k < last_k; ++k) {
      const int stage = state.stage;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const bool begins = kScalesSums ? d % kGroupSlabs == 0 : d == 0 && k == begin;
        start(stage, d, 0, begins, first, sums);
        wgmma_wait<1>();  // the preceding half is done: `second` may be overwritten
        if (d == 0 && k > first_k) release((stage == 0 ? kStages : stage) - 1);
        decode_half<1>(stage, d, slab, second);
        start(stage, d, 1, false, second, sums);
        float scales[kMmaTiles][2];
        const bool ends_group = kScalesSums && (d + 1) % kGroupSlabs == 0;
        if (ends_group) load_scales(stage, d, scales);
        wgmma_wait<1>();
        if (d + 1 < kDepth) {
          decode_half<0>(stage, d + 1, slab, first);
        } else {
          state.advance();
          if (k + 1 < last_k) {
            wait_full(state);
            decode_half<0>(state.stage, 0, slab, first);
          }
        }
        if (ends_group) {
          wgmma_wait<0>();
          add_group(scales, part, acc);
        }
      }
      if constexpr (kParts > 1) {
        if (k + 1 == end || k + 1 == last_k) {
          wgmma_wait<0>();
          add_part(part, acc);
          begin = k + 1, end = part_begin(++part_idx + 1);
        }
      }
    }
    wgmma_wait<0>();
    release((state.stage == 0 ? kStages : state.stage) - 1);
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) {
      wgmma_pin(acc[j]);
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) acc[j][i] *= kWeightDivisor;
    }
  }

  // Adds up the sums of the cluster's CTAs for this CTA's slice, in order. Returns false if this
  // CTA has no slice.
  __device__ __forceinline__ bool exchange(const Sums& acc, float (&own)[kSliceSums]) const {
    const int me = cluster_rank();
    const auto at = [&](int from, int to, int vec) {
      const int place = from - (from > to);
      return (place * kSliceVecs + vec) * kConsumerThreads + static_cast<int>(threadIdx.x);
    };
#pragma unroll
    for (int to = 0; to < kFinishers; ++to) {
#pragma unroll
      for (int i = 0; i < kSliceVecs; ++i) {
        const int first = to * kSliceVecs, eights = kSliceTokens / 8;
        const float* a = acc[first % kMmaTiles + i / eights] + (first / kMmaTiles + i % eights) * 4;
        if (to == me) {
#pragma unroll
          for (int c = 0; c < 4; ++c) own[i * 4 + c] = a[c];
        } else {
          st_async(smem_address(smem.sums) + at(me, to, i) * 16, smem_address(&smem.sums_full), to,
                   a[0], a[1], a[2], a[3]);
        }
      }
    }
    if (me >= kFinishers) return false;
    mbarrier_wait_cluster(smem_address(&smem.sums_full), 0);
#pragma unroll
    for (int i = 0; i < kSliceVecs; ++i) {
      float sum[4] = {};
#pragma unroll
      for (int from = 0; from < kSplits; ++from) {
        Vec<float, 4> part = {own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]};
        if (from != me) part = load_vec<float, 4>(smem.sums + at(from, me, i) * 4);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += part.v[c];
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) own[4 * i + c] = sum[c];
    }
    return true;
  }

  // Turns a mixed tile's gate sums into results: rows g are gate, rows g + 8 are up.
  __device__ __forceinline__ void combine(const RowEpilogue& e, float* sums, int block) const {
    const int column = block * (kRows / 2) + row_tile(0) * 8 + lane_idx / 4;
    const bool has_bias = e.e.bias != nullptr && column < e.columns;
    const float gate = has_bias ? to_float(e.e.bias[column]) : 0.0f;
    const float up = has_bias ? to_float(e.e.bias[e.num_gates + column]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      float* v = sums + 4 * i;
      v[0] = silu(v[0] + gate) * (v[2] + up), v[1] = silu(v[1] + gate) * (v[3] + up);
    }
  }

  // Writes a tile of 16-bit results with at most a bias: each warpgroup works alone and stages half
  // the bytes. A row of staging holds a token's 64 results of an m-tile, or 32 if gated.
  __device__ __forceinline__ void store_halves(const RowEpilogue& e, Sums& acc,
                                               const WorkTile& tile, int num_tokens) const {
    const int warp = warp_idx % 4, width = is_gated ? kMmaM / 2 : kMmaM;
    const unsigned char* staged =
        reinterpret_cast<const unsigned char*>(smem.staging) + warpgroup * kHalvesBytes;
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j) {
      const int first_column = (tile.block * kRows / kMmaM + warpgroup * kMmaTiles + j) * width;
      if (!is_gated) e.add_bias_of_rows(first_column + warp * kTileRows + lane_idx / 4, acc[j]);
#pragma unroll
      for (int first = 0; first < kTokens; first += kHalvesTokens) {
        const int token = tile.token + first;
        if (token >= num_tokens) break;
        if (is_gated)
          stage_gated(smem_address(staged), acc[j] + first / 2);
        else
          stage_halves(smem_address(staged), acc[j] + first / 2);
        named_barrier_sync<128>(2 + warpgroup);
        copy_halves(e, staged, token, min(num_tokens - token, kHalvesTokens), first_column, width);
        named_barrier_sync<128>(2 + warpgroup);  // SAFETY: the next results overwrite staging.
      }
    }
  }

  // Stages the sums as transposed matrices of 8 tokens by 8 weight rows.
  __device__ __forceinline__ void stage_halves(unsigned staging, const float* sums) const {
    const int row = lane_idx % 8 + lane_idx / 16 * 8;  // matrices in 2 x 2 order
    const int part = (warp_idx % 4 * 2 + lane_idx / 8 % 2) ^ (row & 7);
#pragma unroll
    for (int i = 0; i < kHalvesTokens / 16; ++i) {
      const float* v = sums + 8 * i;
      stmatrix_x4_transposed(staging + (i * 16 + row) * 128 + (part << 4),
                             pack2<scalar_t>(v[0], v[1]), pack2<scalar_t>(v[2], v[3]),
                             pack2<scalar_t>(v[4], v[5]), pack2<scalar_t>(v[6], v[7]));
    }
  }
  __device__ __forceinline__ void stage_gated(unsigned staging, const float* sums) const {
    const int part = warp_idx % 4 ^ (lane_idx / 2 & 3);
#pragma unroll
    for (int i = 0; i < kHalvesTokens / 32; ++i) {
      const float* v = sums + 16 * i;
      stmatrix_x4_transposed(staging + (i * 32 + lane_idx) * 64 + (part << 4),
                             pack2<scalar_t>(v[0], v[1]), pack2<scalar_t>(v[4], v[5]),
                             pack2<scalar_t>(v[8], v[9]), pack2<scalar_t>(v[12], v[13]));
    }
  }

  // Copies staged rows of `width` columns to out.
  __device__ __forceinline__ void copy_halves(const RowEpilogue& e, const unsigned char* staged,
                                              int token, int count, int column, int width) const {
    const int shift = is_gated ? 2 : 3, mask = is_gated ? 3 : 7;
    const int thread = threadIdx.x % 128, part = thread & mask;
    for (int i = thread >> shift; i < count; i += 128 >> shift) {
      const int place = part ^ (is_gated ? i / 2 & 3 : i & 7);
      e.store_eight(token + i, column + part * 8,
                    load_vec<scalar_t, 8>(
                        reinterpret_cast<const scalar_t*>(staged + i * width * 2 + (place << 4))));
    }
  }

  // Writes slice `slice` of a tile through staging, which transposes sums into rows.
  __device__ __forceinline__ void store(const RowEpilogue& e, float* sums, const WorkTile& tile,
                                        int num_tokens, int slice) const {
    const int mma = slice * kSliceVecs % kMmaTiles;
    const int token = tile.token + slice * kSliceVecs / kMmaTiles * 8;
    const int count = min(kSliceTokens, num_tokens - token);
#pragma unroll 1
    for (int first = 0; first < count; first += kChunk) {
#pragma unroll
      for (int i = 0; i < kSliceTokens; i += kChunk)  // registers cannot be indexed
        if (i == first) stage(sums + i / 2);
      named_barrier_sync<kConsumerThreads>(1);
      finish_staged(e, smem.staging, token + first, min(kChunk, count - first), tile.block, mma);
      named_barrier_sync<kConsumerThreads>(1);  // SAFETY: the next sums overwrite staging.
    }
  }

  // Stages kChunk tokens of each m-tile of a slice; `sums` points to the first m-tile's sums.
  __device__ __forceinline__ void stage(const float* sums) const {
    const int g = lane_idx / 4, t = lane_idx % 4;
#pragma unroll
    for (int j = 0; j < kSliceMmaTiles; ++j) {
      const int row = ((warpgroup * kSliceMmaTiles + j) * 4 + warp_idx % 4) * kTileRows + g;
#pragma unroll
      for (int i = 0; i < kChunk / 8; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          smem.staging[(i * 8 + 2 * t + c % 2) * kStagingRow + row + c / 2 * 8] =
              sums[j * kSliceTokens / 2 + 4 * i + c];
    }
  }
};

__device__ __forceinline__ void consume(const Consumer& c, const RowEpilogue& e,
                                        const TileScheduler& s, int m) {
  pdl_wait();  // the preceding kernel may read our outputs and write our inputs
  PipelineState<kStages> state(0);
#pragma unroll 1
  for (int index = s.first(); index < s.count(); index += s.step()) {
    const WorkTile tile = s.tile(index);
    Sums acc;
    c.multiply(state, acc);
    if constexpr (kSplits > 1) {
      float own[kSliceSums];
      if (c.exchange(acc, own)) c.store(e, own, tile, m, cluster_rank());
    } else if (kStoresHalves && e.has_halves()) {
      if (c.is_gated) c.combine(e, acc[0], tile.block);
      c.store_halves(e, acc, tile, m);
    } else {
      c.store(e, acc[0], tile, m, 0);
    }
  }
}
