// The consumer warpgroups of gemm_fp8_sm90.cu and gemm_int8_sm90.cu: wgmma on codes, scales, then
// the epilogue.
//
// The tensor cores' sums of e4m3 products keep some 14 bits: sums of kPromoteK values of k are
// added to others in float. With blocks their scales are applied there. Sums of int8 are exact.
#pragma once

#include "gemm/consumer_sm90.cuh"
#include "gemm/wgmma_codes.cuh"

constexpr int kScaleBlock = 128;
static_assert(kSlabK == kScaleBlock, "a slab of k is a block of scales");
#ifdef BLOCKS
constexpr bool kBlocks = BLOCKS;
static_assert(!kBlocks || kScaleBlock % kTileN == 0, "a tile's columns are of one block");
#else
constexpr bool kBlocks = false;
#endif

struct W8Scales {
  const float* x;       // (M,), or (M, ceil(K / 128)) with kBlocks
  const float* weight;  // (N,), or (ceil(N / 128), ceil(K / 128)) with kBlocks
  int num_blocks;       // ceil(K / 128)
};

// The scales of a block of k for a thread's sums: of its two rows in each m-tile, times those of
// the weight for even and odd groups of eight columns (gate and up, where these are split).
struct BlockScales {
  float of[kMmaTilesM][2][2];

  __device__ __forceinline__ void load(const W8Scales& s, const Epilogue& e, int row, int col,
                                       int m, int n, int block) {
    const auto weight_scale = [&](int c) {
      const int64_t r = e.bias_index(c) / kScaleBlock;
      return c < n ? s.weight[r * s.num_blocks + block] : 0.0f;
    };
    const float even = weight_scale(col), odd = e.num_gates > 0 ? weight_scale(col + 8) : even;
#pragma unroll
    for (int j = 0; j < kMmaTilesM; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + j * kMmaM + half * 8;
        const float x = r < m ? s.x[static_cast<int64_t>(r) * s.num_blocks + block] : 0.0f;
        of[j][half][0] = x * even, of[j][half][1] = x * odd;
      }
  }
};

// What `multiply` says of the operands, of the slab that begins at these addresses.
template <typename Sum>
__device__ __forceinline__ void multiply_slab(Sum (&acc)[kWarpgroupCols / 2], unsigned x,
                                              unsigned w, bool accumulate) {
  const uint64_t a = wgmma_descriptor(x), b = wgmma_descriptor(w);
#pragma unroll
  for (int step = 0; step < kSlabK / 32; ++step)
    wgmma_codes<kWarpgroupCols>(acc, a + step * 2, b + step * 2, accumulate || step > 0);
}

// e4m3: sums of each slab are added to `acc`. `row` and `col` are this thread's first.
__device__ __forceinline__ void multiply_e4m3(const Pipeline& p, const TileScheduler& s,
                                              int warpgroup, bool is_warmup,
                                              DynamicPipelineState& state, const W8Scales& scales,
                                              const Epilogue& e, int row, int col, Sums& acc) {
  const unsigned rows = p.x + warpgroup * kMmaTilesM * kMmaM * kSlabRowBytes;
  const unsigned full = is_warmup ? p.idle : p.full;
  const int last_k = is_warmup ? s.first_k + 1 : s.last_k;
  if (is_warmup) state.phase = 1;                  // the phase before the first is over
  state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
#pragma unroll
  for (int j = 0; j < kMmaTilesM; ++j)
#pragma unroll
    for (int i = 0; i < kWarpgroupCols / 2; ++i) acc[j][i] = 0.0f;
#pragma unroll 1
  for (int i = s.first_k; i < last_k; ++i) {
    BlockScales block[kDepth];
    if constexpr (kBlocks) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d)
        if (i * kDepth + d < scales.num_blocks)
          block[d].load(scales, e, row, col, s.m, s.n, i * kDepth + d);
    }
    mbarrier_wait(full + state.stage * 8, state.phase);
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int j = 0; j < kMmaTilesM; ++j) {
        float part[kWarpgroupCols / 2];
        wgmma_fence();
        multiply_slab(part, rows + state.stage * p.stage_x + d * p.slab_x + j * kMmaM * 128,
                      p.w + state.stage * kStageW + d * kBytesW, false);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(part);
        if (d == kDepth - 1 && j == kMmaTilesM - 1 && !is_warmup)
          consumer_release(p, s, state.stage);
#pragma unroll
        for (int c = 0; c < kWarpgroupCols / 2; ++c) {
          if constexpr (kBlocks)
            acc[j][c] += part[c] * block[d].of[j][c / 2 % 2][c / 4 % 2];
          else
            acc[j][c] += part[c];
        }
      }
    state.advance(p.stages);
  }
  if (is_warmup) state = DynamicPipelineState(0);
}

// int8: as `multiply` of consumer_sm90.cuh.
__device__ __forceinline__ void multiply_int8(const Pipeline& p, const TileScheduler& s,
                                              int warpgroup, bool is_warmup,
                                              DynamicPipelineState& state, Sums& sums) {
  const unsigned rows = p.x + warpgroup * kMmaTilesM * kMmaM * kSlabRowBytes;
  const unsigned full = is_warmup ? p.idle : p.full;
  const int last_k = is_warmup ? s.first_k + 1 : s.last_k;
  if (is_warmup) state.phase = 1;                  // the phase before the first is over
  state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
  int acc[kMmaTilesM][kWarpgroupCols / 2] = {};
  int last = 0;
#pragma unroll 1
  for (int i = s.first_k; i < last_k; ++i) {
    mbarrier_wait(full + state.stage * 8, state.phase);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int j = 0; j < kMmaTilesM; ++j)
        multiply_slab(acc[j], rows + state.stage * p.stage_x + d * p.slab_x + j * kMmaM * 128,
                      p.w + state.stage * kStageW + d * kBytesW, true);
    wgmma_commit();
    wgmma_wait<1>();  // the stage before this one has been read
    if (i > s.first_k) consumer_release(p, s, last);
    last = state.stage;
    state.advance(p.stages);
  }
  wgmma_wait<0>();
  if (is_warmup)
    state = DynamicPipelineState(0);
  else
    consumer_release(p, s, last);
#pragma unroll
  for (int j = 0; j < kMmaTilesM; ++j) {
    wgmma_pin(acc[j]);
#pragma unroll
    for (int i = 0; i < kWarpgroupCols / 2; ++i) sums[j][i] = static_cast<float>(acc[j][i]);
  }
}

// Applies the scales of rows and columns to a warp's sums, the first of which is at (row, col).
template <int kSums>
__device__ __forceinline__ void apply_scales(const W8Scales& s, const Epilogue& e,
                                             float (&acc)[kSums], int row, int col, int m, int n) {
  const int lane_idx = threadIdx.x % 32;
  float x[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + lane_idx / 4 + half * 8;
    x[half] = r < m ? s.x[r] : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = col + j * 8 + lane_idx % 4 * 2 + i;
      const float w = c < n ? s.weight[e.bias_index(c)] : 0.0f;
      acc[4 * j + i] = acc[4 * j + i] * x[0] * w;
      acc[4 * j + 2 + i] = acc[4 * j + 2 + i] * x[1] * w;
    }
    if (j % 4 == 3) asm volatile("" ::: "memory");  // no registers for more loads in flight
  }
}

// As `consume` of consumer_sm90.cuh.
__device__ __forceinline__ void consume_codes(const Pipeline& p, const TileScheduler& s,
                                              unsigned char* smem, const Epilogue& e,
                                              const W8Scales& scales, bool is_wide,
                                              const TensorMap* map_out, bool warms_up) {
  // Shuffled, to tell ptxas that it is warp-uniform: descriptors are then computed once per warp.
  const int warp_idx = __shfl_sync(~0u, (threadIdx.x - kFirstConsumer) / 32, 0);
  const int warpgroup = warp_idx / 4;
  unsigned char* staging = smem + (p.staging - p.x) + warp_idx * kStagings * kWarpStaging;
  constexpr int kWarmup = -1;
  const auto next = [&](int index) {
    if (index != kWarmup) return index + s.step();
    pdl_wait();  // the preceding kernel may read what we write, and write what we read
    return s.first();
  };
  DynamicPipelineState state(0);
#pragma unroll 1
  for (int index = warms_up ? kWarmup : next(kWarmup); index < s.count(); index = next(index)) {
    Sums acc;
    const int2 tile = index == kWarmup ? make_int2(s.m, 0) : s.tile(index);
    const int row = tile.x + warpgroup * kMmaTilesM * kMmaM + warp_idx % 4 * 16;
    if constexpr (kCodes == 1)
      multiply_e4m3(p, s, warpgroup, index == kWarmup, state, scales, e, row + threadIdx.x % 32 / 4,
                    tile.y, acc);
    else
      multiply_int8(p, s, warpgroup, index == kWarmup, state, acc);
    if constexpr (kClusterK > 1) {
      float own[kSliceSums];
      if (row >= s.m) continue;  // no such rows in any CTA: none sends or waits
      exchange_sums(p, s, smem + (p.sums - p.x), acc[0], own);
      const Corner corner{staging, row, tile.y + s.rank_k * kSlice};
      if constexpr (!kBlocks) apply_scales(scales, e, own, row, corner.col, s.m, s.n);
      store(e, own, corner, s.m, s.n, is_wide, map_out, 0);
    } else {
#pragma unroll
      for (int i = 0; i < kMmaTilesM; ++i) {
        const Corner corner{staging, row + i * kMmaM, tile.y};
        if constexpr (!kBlocks) apply_scales(scales, e, acc[i], corner.row, tile.y, s.m, s.n);
        store(e, acc[i], corner, s.m, s.n, is_wide, map_out, i);
      }
    }
  }
  if constexpr (kStores) bulk_wait();  // shared memory must outlive the last stores
}
