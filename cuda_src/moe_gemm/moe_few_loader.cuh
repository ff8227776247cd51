// Stages of a warp in the kernels for few tokens: their order, and how they are loaded.
#pragma once

#include "common/few_rows.cuh"
#include "common/pdl.cuh"
#include "moe_gemm/moe_few_x.cuh"

// WEIGHT_KIND is kPacked (1) or kBytes (2) of MoeWeightKind in moe_config_sm90.cuh.
#if WEIGHT_KIND == 1
#include "moe_gemm/moe_few_packed.cuh"
#else
#include "moe_gemm/moe_few_bytes.cuh"
#endif

#if ENGINE_DTYPE != 0

// Consecutive stages of one work tile: rows of the expert's matrix for token tile `tile`.
struct MoeRun {
  int tile, work_tile, begin, end;
};

// Runs of a product: the warp's part of k in every work tile, token tile by token tile.
struct MoeWorkTileWalk {
  const MoeFewBlock& b;
  MoeRun run;
  int num_tiles;

  __device__ __forceinline__ MoeWorkTileWalk(const MoeFewBlock& b, const MoeFewRouting& routing)
      : b(b), num_tiles(routing.num_tiles) {
    run = {0, static_cast<int>(blockIdx.x), b.stage_begin, b.stage_end};
    skip_tiles();
  }
  __device__ __forceinline__ bool is_done() const { return run.tile >= num_tiles; }
  __device__ __forceinline__ void next() {
    run.work_tile += gridDim.x;
    skip_tiles();
  }

 private:
  __device__ __forceinline__ void skip_tiles() {
    while (run.work_tile >= b.num_work_tiles && run.tile < num_tiles)
      run.work_tile -= b.num_work_tiles, ++run.tile;
  }
};

// Runs of a sum over experts: the stages of all token tiles form one sequence, divided among the
// warps.
struct MoeSumWalk {
  MoeRun run;
  int stages;  // stages per token tile
  int left;    // stages left after the run

  __device__ __forceinline__ MoeSumWalk(const MoeFewBlock& b, const MoeFewRouting& routing)
      : stages(b.stages) {
    const int all = routing.num_tiles * stages, parts = blockDim.y;
    const int first = all * static_cast<int>(threadIdx.y) / parts;
    left = all * (static_cast<int>(threadIdx.y) + 1) / parts - first;
    run = {first / stages, static_cast<int>(blockIdx.x), first % stages, 0};
    set_end();
  }
  __device__ __forceinline__ bool is_done() const { return run.end <= run.begin; }
  __device__ __forceinline__ void next() {
    ++run.tile, run.begin = 0;
    set_end();
  }

 private:
  __device__ __forceinline__ void set_end() {
    const int count = min(left, stages - run.begin);
    run.end = run.begin + count, left -= count;
  }
};

// Loads a warp's stages in order of use; with kLoadsX also their columns of x.
template <typename Walk, bool kLoadsX>
struct MoeFewLoader {
  static constexpr int kChunks = kStageColumns / 8;  // 16-byte chunks per row of x in a stage
  static constexpr int kRowsAtOnce = kWarpSize / kChunks;

  const MoeFewParams& p;
  const MoeFewBlock& b;
  const MoeFewRouting& routing;
  MoeFewWeight weight;
  Walk walk;
  int stage;  // next stage in the run
  bool is_done;
  // The ring, bytes of a stage and of the ring, and the offset of the oldest stage, which the next
  // one replaces.
  uint32_t ring;
  int stage_bytes, ring_bytes, at;
  // For the tile's rows of x: their number, this lane's chunk of the first row that it copies, and
  // the columns left in that row; 0 if the row does not exist.
  int count;
  const scalar_t* x_from;
  int x_left, x_place;

  __device__ __forceinline__ MoeFewLoader(const MoeFewParams& p, const MoeFewBlock& b,
                                          const MoeFewRouting& routing, const unsigned char* ring,
                                          int stage_bytes)
      : p(p),
        b(b),
        routing(routing),
        weight(p, b.lane_idx),
        walk(b, routing),
        ring(smem_address(ring)),
        stage_bytes(stage_bytes),
        ring_bytes(p.num_stages * stage_bytes),
        at(0) {
    x_place = kStageBytes + b.lane_idx / kChunks * kXPitch + b.lane_idx % kChunks * 16;
    start_run();
  }

  // Returns row `index` of the tile at this lane's columns of the next stage, or null if there is
  // none.
  __device__ __forceinline__ const scalar_t* x_row(int index) const {
    const int place = routing.tiles[walk.run.tile].first + index;
    const int row = p.pair_weights == nullptr ? routing.rows[place] : place;
    if (row < 0) return nullptr;
    const int column = stage * kStageColumns + b.lane_idx % kChunks * 8;
    return p.x + static_cast<int64_t>(row) * p.k + column;
  }

  __device__ __forceinline__ void start_run() {
    const MoeRun& run = walk.run;
    is_done = walk.is_done() || run.begin >= run.end;
    if (is_done) return;
    stage = run.begin;
    const MoeFewTile t = routing.tiles[run.tile];
    weight.start(t.expert, b.first_row(run.work_tile, threadIdx.z), stage, b.lane_idx);
    if constexpr (!kLoadsX) return;
    count = t.count;
    const int own = b.lane_idx / kChunks;
    x_from = own < count ? x_row(own) : nullptr;
    x_left = x_from == nullptr ? 0 : p.k - stage * kStageColumns - b.lane_idx % kChunks * 8;
  }

  // Copies the stage's columns of the tile's rows of x.
  __device__ __forceinline__ void load_x(uint32_t to) {
    if (b.lane_idx / kChunks < count) cp_async_16(to + x_place, x_from, x_left > 0);
#pragma unroll 1
    for (int first = kRowsAtOnce; first < count; first += kRowsAtOnce) {
      const int index = first + b.lane_idx / kChunks;
      if (index >= count) break;
      const scalar_t* from = x_row(index);
      const bool valid = stage * kStageColumns + b.lane_idx % kChunks * 8 < p.k && from != nullptr;
      cp_async_16(to + x_place + first * kXPitch, from, valid);
    }
  }

  template <bool kWeight, bool kX>
  __device__ __forceinline__ void load() {
    if (!is_done) {
      if constexpr (kWeight) weight.load_stage(ring + at);
      if constexpr (kX) load_x(ring + at);
      if constexpr (kLoadsX) x_from += kStageColumns, x_left -= kStageColumns;
      if (++stage == walk.run.end) walk.next(), start_run();
    }
    at += stage_bytes;
    if (at == ring_bytes) at = 0;
  }

  // Loads the next stage, as one cp.async group.
  __device__ __forceinline__ void load_next() {
    load<true, kLoadsX>();
    cp_async_commit();
  }
  // Fills the ring, in which `loaded` stages are loaded.
  __device__ __forceinline__ void fill(int loaded) {
#pragma unroll 1
    for (int i = loaded; i < p.num_stages; ++i) load_next();
  }
  // Fills the ring but for the columns of x; then the first group contains all stages' weights.
  __device__ __forceinline__ void fill_weights() {
#pragma unroll 1
    for (int i = 0; i < p.num_stages; ++i) load<true, false>();
  }
  __device__ __forceinline__ void fill_x() {
#pragma unroll 1
    for (int i = 0; i < p.num_stages; ++i) {
      load<false, true>();
      cp_async_commit();
    }
  }
};

// Bytes of a stage in a ring.
template <int kTokens>
__device__ __forceinline__ int stage_bytes_of(const MoeFewParams& p) {
  return kStageBytes + (kTokens == 1 ? 0 : p.max_rows * kXPitch);
}

// Fills the rings and stores x of one token. With is_early the preceding kernel, which writes x,
// may still run. SAFETY: it must not write the weight or the routing.
template <int kTokens, typename Loader, typename X>
__device__ __forceinline__ void fill_rings(const MoeFewParams& p, Loader& loader, X& whole_x) {
  const auto wait = [] {
    pdl_wait();
    pdl_trigger();
  };
  if (p.is_early == 0) {
    loader.fill(0);
  } else if constexpr (kTokens == 1) {
    loader.load_next();  // one stage only: x arrives after the weights that were asked for before
    wait();
    whole_x.load();
    loader.fill(1);
  } else {
    Loader behind = loader;
    loader.fill_weights();
    wait();
    behind.fill_x();
  }
  if constexpr (kTokens == 1) {
    whole_x.store();
    __syncthreads();
  }
}

// Waits for a warp's next `count` stages and adds their products; `ring` is the loader's. The
// columns of x are segments of one token's from `segment` on; those of several tokens lie in the
// ring.
template <int kTokens, typename Product, typename Loader, typename X>
__device__ __forceinline__ void multiply_stages(const MoeFewParams& p, Product& product,
                                                Loader& loader, const unsigned char* ring,
                                                const X& whole_x, const MoeFewTile& t, int segment,
                                                int count, int lane_idx) {
#pragma unroll 1
  for (const int end = segment + count; segment < end; ++segment) {
    wait_for_oldest(p.num_stages);
    __syncwarp();  // SAFETY: the lanes see each other's copies.
    const unsigned char* stage = ring + loader.at;
    if constexpr (kTokens == 1)
      product.multiply(stage, whole_x.segment(segment), lane_idx);
    else
      product.multiply(stage, MoeStageX{stage + kStageBytes, kXPitch, t.count, 1.0f}, lane_idx);
    __syncwarp();  // SAFETY: all lanes have read the stage before it is refilled.
    loader.load_next();
  }
}

#endif
