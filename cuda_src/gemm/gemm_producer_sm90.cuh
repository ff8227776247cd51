// The producer of gemm_sm90.cu: one thread that fills the ring of stages by TMA.
#pragma once

#include "gemm/gemm_pipeline_sm90.cuh"
#include "gemm/gemm_scheduler_sm90.cuh"

// Launch parameters of the loads.
struct Loading {
  int x_part;     // rows of x per CTA and tile: kTileM / kClusterN, or fewer
  int tail_part;  // same for the tile of the last rows, which may have fewer
  int early;      // stages of the weight to load before the preceding kernel has ended
  bool uses_pdl;  // the weight may be read while the preceding kernel still runs
  bool is_split;  // all gate rows precede the up rows: map_w interleaves them by eights
};

// Fills the stages. Rows of x outside every TMA box keep stale data: their sums are dropped. A box
// that extends past the last row is slow, so the last tile has its own boxes (map_tail). These
// extend past the last row only if CTAs of a cluster share the tile, by at most 15 rows in total.
struct Loader {
  const Pipeline& p;
  const TensorMap *map_x, *map_tail, *map_w;
  const Loading& loading;
  int m, rank_m, rank_n;
  unsigned short row_mask = 0, col_mask = 0;  // bit masks of the CTAs in this row, in this column

  __device__ __forceinline__ Loader(const Pipeline& p, const TileScheduler& s,
                                    const TensorMap* map_x, const TensorMap* map_tail,
                                    const TensorMap* map_w, const Loading& loading)
      : p(p),
        map_x(map_x),
        map_tail(map_tail),
        map_w(map_w),
        loading(loading),
        m(s.m),
        rank_m(s.rank_m),
        rank_n(s.rank_n) {
    const int layer = s.rank_k * kClusterM * kClusterN;  // first rank with this share of k
    for (int j = 0; j < kClusterN; ++j) row_mask |= 1 << (layer + j * kClusterM + s.rank_m);
    for (int i = 0; i < kClusterM; ++i) col_mask |= 1 << (layer + s.rank_n * kClusterM + i);
  }

  // Returns how many rows of x a CTA loads for the tile that begins at `row`.
  __device__ __forceinline__ int part(int row) const {
    if (row + kTileM <= m) return loading.x_part;
    return row < m ? loading.tail_part : 0;
  }

  // `stage_k`: stage along k. `stage`: index in the ring. `tile`: first row and column.
  __device__ __forceinline__ void weight(int stage, int stage_k, int2 tile) const {
    const unsigned full = p.full + stage * 8;
    mbarrier_arrive_expect_tx(full, kDepth * (part(tile.x) * kClusterN * kSlabRowBytes + kBytesW));
    const unsigned first_dst = p.w + stage * kStageW;
    const int row = tile.y + rank_m * kPartW;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int k = stage_k * kStageK + d * kSlabK;
      const unsigned dst = first_dst + d * kBytesW + rank_m * kPartW * kSlabRowBytes;
      if constexpr (kClusterM == 1) {
        if (is_split())
          tma_load_4d(dst, map_w, k, 0, 0, row / 16, full);
        else
          tma_load_2d(dst, map_w, k, row, full);
      } else {
        if (is_split())
          tma_load_4d_multicast(dst, map_w, k, 0, 0, row / 16, full, col_mask);
        else
          tma_load_2d_multicast(dst, map_w, k, row, full, col_mask);
      }
    }
  }
  __device__ __forceinline__ void x(int stage, int stage_k, int2 tile) const {
    const int rows = part(tile.x), row = tile.x + rank_n * rows;
    if (rows == 0) return;
    const unsigned full = p.full + stage * 8;
    const unsigned first_dst = p.x + stage * p.stage_x + rank_n * rows * kSlabRowBytes;
    const TensorMap* map = tile.x + kTileM <= m ? map_x : map_tail;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int k = stage_k * kStageK + d * kSlabK;
      if constexpr (kClusterN == 1)
        tma_load_2d(first_dst + d * p.slab_x, map, k, row, full);
      else
        tma_load_2d_multicast(first_dst + d * p.slab_x, map, k, row, full, row_mask);
    }
  }
  // Returns how many stages of the first tile's weight to load early, of `count`.
  __device__ __forceinline__ int early(int count) const { return min(count, loading.early); }

  // Prefetches the weight to L2.
  __device__ __forceinline__ void prefetch_weight(int stage_k, int column) const {
    const int row = column + rank_m * kPartW;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int k = stage_k * kStageK + d * kSlabK;
      if (is_split())
        tma_prefetch_4d(map_w, k, 0, 0, row / 16);
      else
        tma_prefetch_2d(map_w, k, row);
    }
  }

 private:
  static constexpr int kPartW = kTileN / kClusterM;  // weight rows per CTA and tile

  // A multicast part must hold whole pairs of eight-row groups, gate and up.
  __device__ __forceinline__ bool is_split() const { return kPartW % 16 == 0 && loading.is_split; }
};

// Starts on the first tile's weight before the preceding kernel has ended: loads it if uses_pdl,
// else prefetches it to L2.
__device__ __forceinline__ void load_early(const Pipeline& p, const TileScheduler& s,
                                           const Loader& loader) {
  const int2 tile = s.tile(s.first());
  for (int i = 0; i < loader.early(s.last_k - s.first_k); ++i) {
    if (loader.loading.uses_pdl)
      loader.weight(i, s.first_k + i, tile);
    else
      loader.prefetch_weight(s.first_k + i, tile.y);
  }
}

__device__ __forceinline__ void produce(const Pipeline& p, const TileScheduler& s,
                                        const Loader& loader) {
  int early = loader.loading.uses_pdl ? loader.early(s.last_k - s.first_k) : 0;
  pdl_wait();
  DynamicPipelineState state(1);
  for (int index = s.first(); index < s.count(); index += s.step()) {
    const int2 tile = s.tile(index);
#pragma unroll 1
    for (int k = s.first_k; k < s.last_k; ++k) {
      if (early > 0) {
        --early;
      } else {
        mbarrier_wait(p.empty + state.stage * 8, state.phase);
        loader.weight(state.stage, k, tile);
      }
      loader.x(state.stage, k, tile);
      state.advance(p.stages);
    }
  }
}
