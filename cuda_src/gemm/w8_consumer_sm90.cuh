// The consumer warpgroups of gemm_fp8_sm90.cu and gemm_int8_sm90.cu: wgmma on codes, scales, then
// the epilogue.
//
// Each slab's sums are added in float outside the tensor cores, which keep only about 14 bits of a
// sum of e4m3 products. With groups, this is also where their scales are applied. Sums of int8
// products are exact. The slabs of a stage keep separate sums, added in ascending order: for the
// same share of k and finite scales, kDepth changes no bit of the result.
#pragma once

#include "gemm/w8_slab_sm90.cuh"

static_assert(kDepth <= 2, "in_pairs multiplies one or two slabs per stage");
// Whether registers can hold the sums of two slabs in addition to the tile's.
constexpr bool kInPairs = kMmaTilesM == 1 && (kWarpgroupCols < 128 || kClusterK == 1);

// Iterates over the scales of a warp's sums, group by group along k. A lane loads the scale of one
// row, l % 16 of m-tile l / 16, and with kBlocks the weight's scales for even and odd groups of
// eight columns (gate and up, if these are split). This takes few registers; none are to spare.
struct GroupScales {
  static_assert(kMmaTilesM <= 2, "a lane for each row");
  const float *x, *weight;  // addresses of the scales of the next group
  int odd, left;            // offset from the even to the odd columns' scale; groups left
  float x_scale, even_scale, odd_scale;
  float next_x, next_even, next_odd;

  // `row` and `col`: first row and column of the warp's sums.
  __device__ __forceinline__ GroupScales(const W8Scales& s, const Epilogue& e, int row, int col,
                                         int m, int n, int group)
      : left(s.num_groups - group) {
    const int lane_idx = threadIdx.x % 32;
    const int r = row + (kMmaTilesM == 2 ? lane_idx / 16 * kMmaM : 0) + lane_idx % 16;
    x = s.x + static_cast<int64_t>(min(r, m - 1)) * s.num_groups + group;
    if constexpr (kBlocks) {
      const auto block_of = [&](int c) { return e.bias_index(min(c, n - 1)) / kScaleBlock; };
      weight = s.weight + static_cast<int64_t>(block_of(col)) * s.num_groups + group;
      odd = e.num_gates > 0 ? (block_of(col + 8) - block_of(col)) * s.num_groups : 0;
    }
  }
  // Moves on to the group that the previous call loaded, and loads the next one. A slab past k, all
  // zeros filled in by TMA, keeps the last group's scales.
  __device__ __forceinline__ void advance() {
    x_scale = next_x;
    if constexpr (kBlocks) even_scale = next_even, odd_scale = next_odd;
    if (left <= 0) return;
    next_x = *x++, --left;
    if constexpr (kBlocks) next_even = *weight, next_odd = weight[odd], ++weight;
  }
};

// Scale factors of a thread's sums: [m-tile][row of two][even or odd group of columns].
struct GroupFactors {
  float of[kMmaTilesM][2][2];

  __device__ __forceinline__ explicit GroupFactors(const GroupScales& s) {
#pragma unroll
    for (int j = 0; j < kMmaTilesM; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int lane = j * 16 + half * 8 + threadIdx.x % 32 / 4;
        const float x = __shfl_sync(~0u, s.x_scale, lane);
        of[j][half][0] = kBlocks ? x * s.even_scale : x;
        of[j][half][1] = kBlocks ? x * s.odd_scale : x;
      }
  }
};

// Sums this CTA's share of k, one slab at a time.
struct SlabMultiplier {
  using Part = typename SlabSum<kCodes>::type[kWarpgroupCols / 2];  // one m-tile's sums of a slab

  const Pipeline& p;
  const TileScheduler& s;
  const int warpgroup;
  const bool is_warmup;
  const unsigned full, rows;
  DynamicPipelineState& state;  // next stage to multiply
  GroupScales& scales;
  int releases;  // next stage to release

  __device__ __forceinline__ void wait() const {
    mbarrier_wait(full + state.stage * 8, state.phase);
  }

  // Starts m-tile j of a slab of the stage.
  __device__ __forceinline__ void start(int j, int slab, Part& part) const {
    wgmma_fence();
    multiply_slab(part, rows + state.stage * p.stage_x + slab * p.slab_x + j * kMmaM * 128,
                  p.w + state.stage * kStageW + slab * kBytesW);
    wgmma_commit();
  }

  __device__ __forceinline__ void release() {
    if (!is_warmup) consumer_release(p, s, releases);
    releases = releases + 1 == p.stages ? 0 : releases + 1;
  }

  __device__ __forceinline__ static void add(int j, const Part& part, const GroupFactors& factors,
                                             Sums& acc) {
#pragma unroll
    for (int c = 0; c < kWarpgroupCols / 2; ++c) {
      const float sum = static_cast<float>(part[c]);
      acc[j][c] += kGroups ? sum * factors.of[j][c / 2 % 2][c / 4 % 2] : sum;
    }
  }

  __device__ __forceinline__ GroupFactors factors() const {
    const GroupFactors of_slab(scales);
    if constexpr (kGroups) scales.advance();
    return of_slab;
  }

  // Adds each slab after its products: while one warpgroup adds, another one multiplies.
  __device__ __forceinline__ void one_by_one(int count, Sums& acc) {
#pragma unroll 1
    for (int i = 0; i < count; i += kDepth) {
      wait();
#pragma unroll
      for (int slab = 0; slab < kDepth; ++slab) {
        const GroupFactors of_slab = factors();
#pragma unroll
        for (int j = 0; j < kMmaTilesM; ++j) {
          Part part;
          start(j, slab, part);
          wgmma_wait<0>();
          wgmma_pin(part);
          if (slab == kDepth - 1 && j == kMmaTilesM - 1) release();
          add(j, part, of_slab, acc);
        }
      }
      state.advance(p.stages);
    }
  }

  // Multiplies the next slab while the current one's sums are added. A stage is awaited before its
  // first slab, and released after its last one. kSlab: the slab's index in its stage.
  template <int kSlab>
  __device__ __forceinline__ void next(Part& part) {
    if constexpr (kSlab == 0) wait();
    start(0, kSlab, part);
    if constexpr (kSlab == kDepth - 1) state.advance(p.stages);
  }
  template <int kSlab, int kInFlight>
  __device__ __forceinline__ void finish(Part& part, Sums& acc) {
    const GroupFactors of_slab = factors();
    wgmma_wait<kInFlight>();
    wgmma_pin(part);
    if constexpr (kSlab == kDepth - 1) release();
    add(0, part, of_slab, acc);
  }
  __device__ __forceinline__ void in_pairs(int count, Sums& acc) {
    constexpr int kEven = 0, kOdd = kDepth - 1;  // indices of the pair's slabs in their stages
    Part even, odd;
    next<kEven>(even);
#pragma unroll 1
    for (; count > 2; count -= 2) {
      next<kOdd>(odd);
      finish<kEven, 1>(even, acc);
      next<kEven>(even);
      finish<kOdd, 1>(odd, acc);
    }
    // Always 2 with kDepth == 2, but if ptxas knows that, it serialises the wgmmas (C7514).
    if (count == 2) {
      next<kOdd>(odd);
      finish<kEven, 1>(even, acc);
      finish<kOdd, 0>(odd, acc);
    } else {
      finish<kEven, 0>(even, acc);
    }
  }
};

// Sums this CTA's share of k; see `multiply` in gemm_consumer_sm90.cuh. `row` and `col`: first row
// and column of the warp's sums.
__device__ __forceinline__ void multiply_codes(const Pipeline& p, const TileScheduler& s,
                                               int warpgroup, bool is_warmup,
                                               DynamicPipelineState& state, const W8Scales& scales,
                                               const Epilogue& e, int row, int col, Sums& acc) {
  if (is_warmup) state.phase = 1;  // no wait: the phase before the first counts as completed
  state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
#pragma unroll
  for (int j = 0; j < kMmaTilesM; ++j)
#pragma unroll
    for (int i = 0; i < kWarpgroupCols / 2; ++i) acc[j][i] = 0.0f;
  GroupScales group(scales, e, row, col, s.m, s.n, s.first_k * kDepth);
  if constexpr (kGroups) group.advance(), group.advance();
  SlabMultiplier multiplier{p,
                            s,
                            warpgroup,
                            is_warmup,
                            is_warmup ? p.idle : p.full,
                            p.x + warpgroup * kMmaTilesM * kMmaM * kSlabRowBytes,
                            state,
                            group,
                            state.stage};
  const int count = (is_warmup ? 1 : s.last_k - s.first_k) * kDepth;  // slabs
  if constexpr (kInPairs)
    multiplier.in_pairs(count, acc);
  else
    multiplier.one_by_one(count, acc);
  if (is_warmup) state = DynamicPipelineState(0);
}

// Applies the column scales and, without groups, the row scales to the sums of kTiles m-tiles, the
// first at (row, col).
template <int kTiles, int kSums>
__device__ __forceinline__ void apply_scales(const W8Scales& s, const Epilogue& e,
                                             float (&acc)[kTiles][kSums], int row, int col, int m,
                                             int n) {
  const int lane_idx = threadIdx.x % 32;
  // Each lane loads the scales of columns lane_idx, lane_idx + 32, ... and gets the others by
  // shuffles: a single load latency.
  float weight[(kSums * 2 + 31) / 32], x[kTiles][2] = {};
#pragma unroll
  for (int i = 0; i < (kSums * 2 + 31) / 32; ++i) {
    const int c = col + i * 32 + lane_idx;
    weight[i] = c < n ? s.weight[e.bias_index(c)] : 0.0f;
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + tile * kMmaM + lane_idx / 4 + half * 8;
      if constexpr (!kGroups) x[tile][half] = r < m ? s.x[r] : 0.0f;
    }
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float w = __shfl_sync(~0u, weight[j / 4], j % 4 * 8 + lane_idx % 4 * 2 + i);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float* a = acc[tile] + 4 * j + i;
        if constexpr (!kGroups) a[0] *= x[tile][0], a[2] *= x[tile][1];
        a[0] *= w, a[2] *= w;
      }
    }
}

// The consumers' loop; see `consume` in gemm_consumer_sm90.cuh.
__device__ __forceinline__ void consume_codes(const Pipeline& p, const TileScheduler& s,
                                              unsigned char* smem, const Epilogue& e,
                                              const W8Scales& scales, bool is_wide,
                                              const TensorMap* map_out, bool warms_up,
                                              int sent_rows) {
  // The shuffle tells ptxas that it is warp-uniform: descriptors are then computed once per warp.
  const int warp_idx = __shfl_sync(~0u, (threadIdx.x - kFirstConsumer) / 32, 0);
  const int warpgroup = warp_idx / 4;
  unsigned char* staging = smem + (p.staging - p.x) + warp_idx * kStagings * kWarpStaging;
  constexpr int kWarmup = -1;
  const auto next = [&](int index) {
    if (index != kWarmup) return index + s.step();
    pdl_wait();  // the preceding kernel may read our outputs and write our inputs
    return s.first();
  };
  DynamicPipelineState state(0);
#pragma unroll 1
  for (int index = warms_up ? kWarmup : next(kWarmup); index < s.count(); index = next(index)) {
    Sums acc;
    const int2 tile = index == kWarmup ? make_int2(s.m, 0) : s.tile(index);
    const int row = tile.x + warpgroup * kMmaTilesM * kMmaM + warp_idx % 4 * 16;
    multiply_codes(p, s, warpgroup, index == kWarmup, state, scales, e, row, tile.y, acc);
    if constexpr (kClusterK > 1) {
      float own[1][kSliceSums];
      if (row >= s.m) continue;  // no CTA sends or awaits these nonexistent rows
      exchange_sums(p, s, smem + (p.sums - p.x), acc[0], own[0]);
      const Corner corner{staging, row, tile.y + s.rank_k * kSlice};
      if constexpr (!kBlocks) apply_scales(scales, e, own, row, corner.col, s.m, s.n);
      store(e, own[0], corner, s.m, s.n, is_wide, map_out, 0);
    } else {
      if constexpr (!kBlocks) apply_scales(scales, e, acc, row, tile.y, s.m, s.n);
#pragma unroll
      for (int i = 0; i < kMmaTilesM; ++i) {
        const Corner corner{staging, row + i * kMmaM, tile.y};
        store(e, acc[i], corner, s.m, s.n, is_wide, map_out, i);
      }
    }
    if constexpr (kSends) {
      if (tile.x < sent_rows) count_stored(p.stored);
    }
  }
  if constexpr (kStores) bulk_wait();  // shared memory must outlive the stores in flight
}
