// The producer warps of attention_prefill_fp8_sm90: one thread fetches work tiles and loads Q, K
// and V; two warps transpose V, as 8-bit wgmma requires K-major operands.
#pragma once

#include "attention_prefill/attention_prefill_fp8_tile_sm90.cuh"

// ---- the loading thread -------------------------------------------------------------------------

__device__ __forceinline__ void load_tiles(const SharedMemory& smem, const Problem& problem,
                                           const TensorMap* q_map, const TensorMap* k_map,
                                           const TensorMap* v_map) {
  PipelineState<kQStages> q_ring(1);
  PipelineState<kStages> ring(1);
  int next = blockIdx.x;
  while (next < problem.total) {
    const int t = next;
    const int taken = atomicAdd(problem.counter, 1);
    if (taken == problem.total - 1) *problem.counter = 0;  // every block is past its last tile
    next = gridDim.x + taken;
    WorkTile tile;
    if (!find_work_tile<kKeys>(problem, t, tile)) continue;

    mbarrier_wait(smem.q_empty + 8 * q_ring.stage, q_ring.phase);
    smem.work[q_ring.stage] = tile;
    const unsigned q_barrier = smem.q_full + 8 * q_ring.stage;
    mbarrier_arrive_expect_tx(q_barrier, kHeadDim * problem.group * problem.tile_tokens);
    tma_load_4d(smem.q + q_ring.stage * kQBytes, q_map, 0, 0, tile.kv_head, tile.first_token,
                q_barrier);
    q_ring.advance();

    for (int n = tile.end - 1; n >= tile.begin; --n) {
      const int row = tile.k_begin + n * kKeys;
      mbarrier_wait(smem.k_empty + 8 * ring.stage, ring.phase);
      mbarrier_arrive_expect_tx(smem.k_full + 8 * ring.stage, kKeyBytes);
      tma_load_3d(smem.k + ring.stage * kKeyBytes, k_map, 0, tile.kv_head, row,
                  smem.k_full + 8 * ring.stage);
      mbarrier_wait_to_overwrite(smem.raw_empty + 8 * ring.stage, ring.phase);
      mbarrier_arrive_expect_tx(smem.raw_full + 8 * ring.stage, kKeyBytes);
      tma_load_3d(smem.raw + ring.stage * kKeyBytes, v_map, 0, tile.kv_head, row,
                  smem.raw_full + 8 * ring.stage);
      ring.advance();
    }
  }
  mbarrier_wait(smem.q_empty + 8 * q_ring.stage, q_ring.phase);
  smem.work[q_ring.stage].first_token = -1;
  mbarrier_arrive(smem.q_full + 8 * q_ring.stage);
}

// ---- the warps that transpose V -----------------------------------------------------------------

constexpr int kBlocksAtOnce = 4;  // blocks that a warp transposes concurrently

// A block is 16 keys x 32 columns. ldmatrix moves pairs of columns; the bytes are then permuted so
// that a row of the result is one column, with its 16 keys in the order 0 1 8 9, 2 3 10 11, ...:
// the order of a thread's scores when P becomes operand A. Within each 16 columns the even ones
// come first, then the odd ones. This puts eight rows in different banks, and gives each consumer
// thread four consecutive columns.
//
// Transposes a tile's 8 x D / 32 blocks, kBlocks at a time so that their latencies overlap. Keys
// from `valid` on become zero: P is 0 there, but 0 * NaN would reach the sum.
template <bool kIsWhole>
__device__ __forceinline__ void transpose_tile(unsigned from, unsigned to, int worker, int lane_idx,
                                               int valid) {
  constexpr int kGroups = kKeys / 16 / kTransposers, kBlocks = kIsWhole ? kBlocksAtOnce : 1;
  const int row = lane_idx / 8 % 2 * 8 + lane_idx % 8;  // row within the first 16 keys
  const int swizzle = kHeadDim == 64 ? row / 2 % 4 : row % 8;
  from += (worker * kGroups * 16 + row) * kHeadDim + ((lane_idx / 16 ^ swizzle) << 4);
  to += lane_idx * kKeys + ((worker * kGroups ^ (lane_idx & 7)) << 4);
#pragma unroll 1
  for (int columns = 0; columns < kHeadDim; columns += 32)
#pragma unroll(kIsWhole ? kGroups : 1)
    for (int group = 0; group < kGroups; group += kBlocks) {
      unsigned x[kBlocks][4];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        ldmatrix_transposed_x4(x[i], (from ^ columns) + (group + i) * 16 * kHeadDim);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        unsigned y[4] = {
            __byte_perm(x[i][0], x[i][1], 0x6420), __byte_perm(x[i][0], x[i][1], 0x7531),
            __byte_perm(x[i][2], x[i][3], 0x6420), __byte_perm(x[i][2], x[i][3], 0x7531)};
        if constexpr (!kIsWhole) {
          const int first = (worker * kGroups + group + i) * 16 + 2 * (lane_idx % 4);
          unsigned mask = 0;
#pragma unroll
          for (int key = 0; key < 4; ++key)
            if (first + key / 2 * 8 + key % 2 < valid) mask |= 0xFFu << 8 * key;
#pragma unroll
          for (unsigned& word : y) word &= mask;
        }
        stmatrix_x4((to ^ (group + i) << 4) + columns * kKeys, y[0], y[1], y[2], y[3]);
      }
    }
}

__device__ __forceinline__ void transpose_values(const SharedMemory& smem, int worker) {
  const int lane_idx = threadIdx.x % 32;
  PipelineState<kQStages> q_ring(0);
  PipelineState<kStages> ring(0);
  for (;;) {
    mbarrier_wait(smem.q_full + 8 * q_ring.stage, q_ring.phase);
    const WorkTile& tile = smem.work[q_ring.stage];
    if (tile.first_token < 0) return;
    const int begin = tile.begin, num_keys = tile.num_keys;
    int n = tile.end;
    mbarrier_arrive(smem.q_empty + 8 * q_ring.stage);
    q_ring.advance();
    while (--n >= begin) {
      mbarrier_wait(smem.v_empty + 8 * ring.stage, ring.phase ^ 1);
      mbarrier_wait(smem.raw_full + 8 * ring.stage, ring.phase);
      const unsigned from = smem.raw + ring.stage * kKeyBytes;
      const unsigned to = smem.v + ring.stage * kValueBytes;
      const int valid = num_keys - n * kKeys;
      if (valid >= kKeys) {
        transpose_tile<true>(from, to, worker, recomputed(lane_idx), valid);
      } else {
        transpose_tile<false>(from, to, worker, recomputed(lane_idx), valid);
      }
      fence_async_proxy();
      mbarrier_arrive(smem.v_full + 8 * ring.stage);
      mbarrier_arrive(smem.raw_empty + 8 * ring.stage);
      ring.advance();
    }
  }
}
