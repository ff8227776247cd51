// Parameters of moe_gemm_few_tokens.cu and moe_gemm_combine.cu, and the division of their work
// among blocks and warps.
//
// A token tile holds up to max_rows rows of x of one expert; each block derives the token tiles
// from `offsets`. A work tile is blockDim.z row tiles (16 rows each) of that expert's matrix; the
// work tiles of all token tiles form one sequence, and a block computes every gridDim.x-th. Warp
// (y, z) multiplies row tile z of a work tile by part_stages stages of k, from stage y *
// part_stages on; the parts' sums are added in order. moe_gemm_combine.cu uses the same token
// tiles, but divides k differently: see there.
#pragma once

#include "common/reduce.cuh"
#include "moe_gemm/moe_activation.cuh"

struct MoeFewParams {
  const unsigned char* data;    // (E, R, K) bytes; packed: planes of the matrix (E R, K)
  const unsigned char* high;    // packed only, or null
  const unsigned char* scales;  // bytes: float, (E, blocks of rows, blocks of columns)
  const unsigned char* supers;  // packed only, or null
  const scalar_t* x;            // (T, K), or (P, K) with pair_weights; contiguous
  const int* order;             // (P,)
  const int* offsets;           // (E + 1,)
  const float* pair_weights;    // (P,), or null
  const scalar_t* bias;         // (E, R), or null
  // moe_gemm_combine only: (T, R), (T,) and (T, R), or null; residual may be out.
  const scalar_t* shared;
  const scalar_t* shared_gate;
  const scalar_t* residual;
  scalar_t* out;  // (P, R), or (P, R / 2) with an activation; moe_gemm_combine: (T, R)
  int num_tokens, num_pairs, num_experts, num_rows, k, top_k;
  int groups, num_supers;  // entries per packed row
  int max_rows;            // maximum rows of x per token tile
  int part_stages;         // stages of k per warp; unused by moe_gemm_combine
  int num_stages;          // stages per warp's ring
  int activation;          // a MoeActivation
  float alpha, limit;
  int is_early;  // the preceding kernel writes neither weight, bias nor the routing
};

constexpr int kWeightRows = 16;  // rows per row tile
constexpr int kMaxPairs = 128;
constexpr int kMaxWarps = 16;

struct MoeFewTile {
  int expert, first, count;  // expert; first index in the sorted order; number of pairs
};

// A block's copy of the routing.
struct MoeFewRouting {
  MoeFewTile tiles[kMaxPairs];
  int rows[kMaxPairs];       // by sorted index: row of x, or the pair with pair_weights; -1: none
  float weights[kMaxPairs];  // by sorted index: the pair's weight, or 1 without pair_weights
  int warp_tiles[kMaxWarps];
  int num_tiles;

  // Returns the token tiles of the preceding warps and of all warps; all threads must call it.
  __device__ __forceinline__ int2 tiles_before(int own, int lane_idx, int warp_idx, int num_warps) {
    int after = own;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, after, step);
      if (lane_idx >= step) after += other;
    }
    if (lane_idx == kWarpSize - 1) warp_tiles[warp_idx] = after;
    __syncthreads();
    int before = after - own, all = 0;
    for (int i = 0; i < num_warps; ++i) {
      if (i < warp_idx) before += warp_tiles[i];
      all += warp_tiles[i];
    }
    return int2{before, all};
  }

  // Called by all threads; a barrier must follow.
  __device__ __forceinline__ void find(const MoeFewParams& p, int thread, int threads) {
    // The last threads do this while the first ones wait for `offsets`.
    for (int place = threads - 1 - thread; place < p.num_pairs; place += threads) {
      const int pair = p.order[place];
      const bool valid = pair >= 0 && pair < p.num_pairs;
      const bool is_gathered = p.pair_weights == nullptr;
      rows[place] = !valid ? -1 : !is_gathered ? pair : p.max_rows == 1 ? 0 : pair / p.top_k;
      weights[place] = is_gathered || !valid ? 1.0f : p.pair_weights[pair];
    }
    if (p.max_rows == 1)
      find_pairs(p, thread, threads);
    else
      find_tiles(p, thread, threads);
  }

 private:
  // The first place of an expert's pairs in the sorted order, and the place behind the last.
  __device__ __forceinline__ static int2 places(const MoeFewParams& p, int expert) {
    const int first = min(max(p.offsets[expert], 0), p.num_pairs);
    return int2{first, min(max(p.offsets[expert + 1], first), p.num_pairs)};
  }

  // Every pair is a token tile, so no scan is needed. SAFETY: where wrong offsets overlap, several
  // experts write a tile; any mix of what they write names an expert and a place that exist.
  __device__ __forceinline__ void find_pairs(const MoeFewParams& p, int thread, int threads) {
    const int before = min(max(p.offsets[0], 0), p.num_pairs);
    for (int expert = thread; expert < p.num_experts; expert += threads) {
      const int2 range = places(p, expert);
      for (int place = range.x; place < range.y; ++place)
        tiles[max(place - before, 0)] = {expert, place, 1};
      if (expert == p.num_experts - 1) num_tiles = max(range.y - before, 0);
    }
  }

  __device__ __forceinline__ void find_tiles(const MoeFewParams& p, int thread, int threads) {
    const int lane_idx = thread % kWarpSize, warp_idx = thread / kWarpSize;
    int found = 0;
    for (int begin = 0; begin < p.num_experts; begin += threads) {
      const int expert = begin + thread;
      int2 range{0, 0};
      if (expert < p.num_experts) range = places(p, expert);
      const int own = (range.y - range.x + p.max_rows - 1) / p.max_rows;
      const int2 before = tiles_before(own, lane_idx, warp_idx, threads / kWarpSize);
      for (int i = 0, at = found + before.x; i < own && at < kMaxPairs; ++i, ++at) {
        const int place = range.x + i * p.max_rows;
        tiles[at] = {expert, place, min(p.max_rows, range.y - place)};
      }
      found += before.y;
      __syncthreads();  // SAFETY: the next round writes warp_tiles again.
    }
    if (thread == 0) num_tiles = min(found, kMaxPairs);
  }
};

// A warp's part of its block's work, and the block's part of the problem.
struct MoeFewBlock {
  int lane_idx, warp_idx, num_warps, threads, thread;
  int num_gates;       // number of gate rows; 0: no gate
  int columns;         // columns of out
  int num_work_tiles;  // work tiles per token tile
  int stages;          // number of stages of k
  int stage_begin, stage_end;

  __device__ __forceinline__ MoeFewBlock(const MoeFewParams& p, int stages) : stages(stages) {
    lane_idx = threadIdx.x;
    warp_idx = threadIdx.z * blockDim.y + threadIdx.y;
    num_warps = blockDim.y * blockDim.z;
    threads = num_warps * kWarpSize;
    thread = warp_idx * kWarpSize + lane_idx;
    num_gates = p.activation != kNone ? p.num_rows / 2 : 0;
    columns = num_gates > 0 ? num_gates : p.num_rows;
    const int row_tiles = (columns + kWeightRows - 1) / kWeightRows;
    const int tiles = out_tiles();
    num_work_tiles = (row_tiles + tiles - 1) / tiles;
    stage_begin = min(stages, static_cast<int>(threadIdx.y) * p.part_stages);
    stage_end = min(stages, stage_begin + p.part_stages);
  }
  // Number of row tiles of out in a work tile.
  __device__ __forceinline__ int out_tiles() const {
    return num_gates > 0 ? blockDim.z / 2 : blockDim.z;
  }
  // Returns the first row of row tile z of a work tile; it may be past the last row. If gated, even
  // row tiles belong to gate, and odd ones are the matching row tiles of up.
  __device__ __forceinline__ int first_row(int work_tile, int z) const {
    const int index = work_tile * static_cast<int>(blockDim.z) + z;
    if (num_gates == 0) return index * kWeightRows;
    return index / 2 * kWeightRows + index % 2 * num_gates;
  }
};
