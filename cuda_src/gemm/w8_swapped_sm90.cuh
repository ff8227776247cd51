// The consumer warpgroups of swapped tiles of gemm_fp8_sm90.cu and gemm_int8_sm90.cu; see
// w8_consumer_sm90.cuh and gemm_swapped_sm90.cuh.
#pragma once

#include "gemm/w8_slab_sm90.cuh"

// Adds the sums of a tile's slabs. With kGroups they are multiplied by the scales of their groups.
// Scales are loaded one stage ahead: each lane loads those of one row of x, and each warp those of
// its rows of the weight.
class SwappedGroups {
  static constexpr int kSlabs = kDepth / kSlabStep;  // slabs of a stage that the warpgroup adds
  struct Scales {
    float x[kSlabs], weight[kSlabs][2];
  };
  const float *x, *weight[2];
  int group, num_groups;
  Scales now, next;

  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      const int at = min(group + i * kSlabStep, num_groups - 1);  // sums of a slab past k are 0
      next.x[i] = x != nullptr ? x[at] : 0.0f;
      if constexpr (kBlocks) next.weight[i][0] = weight[0][at], next.weight[i][1] = weight[1][at];
    }
    group += kDepth;
  }

 public:
  // `tile`: first row and column of the tile.
  __device__ __forceinline__ SwappedGroups(const W8Scales& s, const Epilogue& e, int2 tile,
                                           int warp_idx, int m, int n)
      : group(kSplitsSlabs ? warp_idx / 4 : 0), num_groups(s.num_groups) {
    if constexpr (!kGroups) return;
    static_assert(!kGroups || kTileM <= 32, "a lane for each row of x");
    const int row = tile.x + static_cast<int>(threadIdx.x) % 32 % kTileM;
    x = row < m ? s.x + static_cast<int64_t>(row) * num_groups : nullptr;
#pragma unroll
    for (int half = 0; kBlocks && half < 2; ++half) {
      const int c = tile.y + swapped_row(warp_idx) + half * 8;
      const int block = e.bias_index(min(c, n - 1)) / kScaleBlock;
      weight[half] = s.weight + static_cast<int64_t>(block) * num_groups;
    }
    load();
    advance();
  }

  // Moves on to the next stage.
  __device__ __forceinline__ void advance() {
    if constexpr (!kGroups) return;
    now = next;
    load();
  }

  // Adds the products of the warpgroup's slab kSlab of the stage.
  template <int kSlab, typename Sum>
  __device__ __forceinline__ void add(const Sum (&part)[kWarpgroupCols / 2],
                                      float (&acc)[kWarpgroupCols / 2]) const {
#pragma unroll
    for (int i = 0; i < kWarpgroupCols / 2; ++i) {
      float factor = 1.0f;
      if constexpr (kGroups)
        factor = __shfl_sync(~0u, now.x[kSlab], i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2);
      if constexpr (kBlocks) factor *= now.weight[kSlab][i / 2 % 2];
      const float sum = static_cast<float>(part[i]);
      acc[i] += kGroups ? sum * factor : sum;
    }
  }
};

// Scales of a warp's sums that are the same for all of k. A lane holds those of its two rows of the
// weight, and that of one row of x.
struct SwappedScales {
  float weight[2], x;

  // `tile`: first row and column of the tile.
  __device__ __forceinline__ SwappedScales(const W8Scales& s, const Epilogue& e, int2 tile,
                                           int warp_idx, int m, int n) {
    const int lane_idx = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; !kBlocks && half < 2; ++half) {
      const int c = tile.y + swapped_row(warp_idx) + half * 8 + lane_idx / 4;
      weight[half] = c < n ? s.weight[e.bias_index(c)] : 0.0f;
    }
    if constexpr (!kGroups) {
      const int row = tile.x + lane_idx;
      x = row < m ? s.x[row] : 0.0f;
    }
  }

  __device__ __forceinline__ void apply(float (&acc)[kWarpgroupCols / 2]) const {
#pragma unroll
    for (int i = 0; i < kWarpgroupCols / 2; ++i) {
      if constexpr (!kGroups)
        acc[i] *= __shfl_sync(~0u, x, i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2);
      if constexpr (!kBlocks) acc[i] *= weight[i / 2 % 2];
    }
  }
};

// Sums a warpgroup's share of k of a tile. The sums of one slab are added while the next one is
// multiplied.
struct SwappedMultiplier {
  using TileSums = float[kWarpgroupCols / 2];
  using Part = typename SlabSum<kCodes>::type[kWarpgroupCols / 2];  // a slab's sums
  static constexpr int kSlabs = kDepth / kSlabStep;  // slabs of a stage that the warpgroup sums
  static_assert(kSlabs % 2 == 0, "slabs take turns in two sets of sums");

  const Pipeline& p;
  const TileScheduler& s;
  const int warpgroup;
  const bool is_warmup;
  DynamicPipelineState& state;  // next stage to multiply
  SwappedGroups& groups;
  int releases;  // next stage to release

  template <int kSlab>
  __device__ __forceinline__ void start(Part& part) {
    if constexpr (kSlab == 0)
      mbarrier_wait((is_warmup ? p.idle : p.full) + state.stage * 8, state.phase);
    const int slab = kSlab * kSlabStep + (kSplitsSlabs ? warpgroup : 0);
    const int row = kSplitsSlabs ? 0 : warpgroup * kMmaM;
    wgmma_fence();
    multiply_slab(part, p.w + state.stage * kStageW + slab * kBytesW + row * kSlabRowBytes,
                  p.x + state.stage * p.stage_x + slab * p.slab_x);
    wgmma_commit();
    if constexpr (kSlab == kSlabs - 1) state.advance(p.stages);
  }

  template <int kSlab, int kInFlight>
  __device__ __forceinline__ void finish(Part& part, TileSums& acc) {
    wgmma_wait<kInFlight>();
    wgmma_pin(part);
    if constexpr (kSlab == kSlabs - 1) {
      if (!is_warmup) consumer_release(p, s, releases);
      releases = releases + 1 == p.stages ? 0 : releases + 1;
    }
    groups.add<kSlab>(part, acc);
    if constexpr (kSlab == kSlabs - 1) groups.advance();
  }

  // Starts slabs kSlab, ... of a stage, and finishes the one before each.
  template <int kSlab>
  __device__ __forceinline__ void slabs_from(Part& even, Part& odd, TileSums& acc) {
    if constexpr (kSlab < kSlabs) {
      start<kSlab>(kSlab % 2 ? odd : even);
      finish<kSlab - 1, 1>(kSlab % 2 ? even : odd, acc);
      slabs_from<kSlab + 1>(even, odd, acc);
    }
  }

  __device__ __forceinline__ void multiply(int stages, TileSums& acc) {
    Part even, odd;
    start<0>(even);
#pragma unroll 1
    for (; stages > 1; --stages) {
      slabs_from<1>(even, odd, acc);
      start<0>(even);
      finish<kSlabs - 1, 1>(odd, acc);
    }
    if (stages == 1) {  // always, but if ptxas knows that, it serialises the wgmmas (C7514)
      slabs_from<1>(even, odd, acc);
      finish<kSlabs - 1, 0>(odd, acc);
    } else {
      finish<0, 0>(even, acc);
    }
  }
};

// The consumers' loop; see `consume` in gemm_consumer_sm90.cuh. Results are stored four at a time,
// without a map.
__device__ __forceinline__ void consume_codes(const Pipeline& p, const TileScheduler& s,
                                              unsigned char* smem, const Epilogue& e,
                                              const W8Scales& scales, bool, const TensorMap*,
                                              bool warms_up, int) {
  // The shuffle tells ptxas that it is warp-uniform: descriptors are then computed once per warp.
  const int warp_idx = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp_idx / 4;
  constexpr int kWarmup = -1;
  DynamicPipelineState state(0);
#pragma unroll 1
  for (int index = warms_up ? kWarmup : s.first(); index < s.count();
       index = index == kWarmup ? s.first() : index + s.step()) {
    const bool is_warmup = index == kWarmup;
    if (!is_warmup) pdl_wait();  // the preceding kernel may read our outputs and write our inputs
    const int2 tile = is_warmup ? make_int2(s.m, 0) : s.tile(index);
    if (is_warmup) state.phase = 1;  // no wait: the phase before the first counts as completed
    state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
    SwappedMultiplier::TileSums acc = {};
    const SwappedScales own(scales, e, tile, warp_idx, s.m, s.n);
    SwappedGroups groups(scales, e, tile, warp_idx, s.m, s.n);
    SwappedMultiplier multiplier{p, s, warpgroup, is_warmup, state, groups, state.stage};
    multiplier.multiply(is_warmup ? 1 : s.last_k - s.first_k, acc);
    if (is_warmup) state = DynamicPipelineState(0);
    own.apply(acc);
    store_swapped(e, acc, smem + (p.staging - p.x), tile, warpgroup, s.m, s.n);
  }
}
