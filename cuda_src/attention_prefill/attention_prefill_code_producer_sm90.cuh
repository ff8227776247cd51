// The producer warps of attention_prefill_sm90 for quantized pages: one fetches work tiles and
// loads their Q, one loads the codes of K and V, and two convert the codes exactly to scalar_t in
// the stages that the consumers read. The key scale is folded into the scores' factor, the value
// scale into the results' factor.
#pragma once

#include "attention_prefill/attention_prefill_producer_sm90.cuh"

// Byte offset of 16-byte word `word` of row `row` in a tile of codes, which TMA swizzles over the
// 128 or 64 bytes of a row.
__device__ __forceinline__ unsigned code_offset(int row, int word) {
  if constexpr (kHeadDim == 64) return row * 64 + (word ^ row / 2 % 4) * 16;
  return row * 128 + (word ^ row % 8) * 16;
}

struct CodeProducer : Producer {
  // Warp 1: loads codes to separate stages and records the number of valid rows of each. See
  // load_keys.
  __device__ __forceinline__ void load_codes(const TensorMap* k_map, const TensorMap* v_map) const {
    const int lane_idx = threadIdx.x % 32;
    PipelineState<kCodeStages> ring(1);
    for (unsigned tiles = 0;; ++tiles) {
      mbarrier_wait(smem.work_full + tiles % kQStages * 8, tiles / kQStages % 2);
      const WorkTile& tile = smem.work[tiles % kQStages];
      if (tile.first_token < 0) break;
      for (int n = tile.end; n > tile.begin; --n) {
        const int row = key_box_row<kKeys>(problem, tile, n - 1, lane_idx);
        const int valid = tile.num_keys - (n - 1) * kKeys;
        load_tile(ring, k_map, row, lane_idx, kKeys);
        load_tile(ring, v_map, row, lane_idx, min(valid, kKeys));
      }
      mbarrier_arrive(smem.q_empty + tiles % kQStages * 8);
    }
    mbarrier_wait(smem.codes_empty + 8 * ring.stage, ring.phase);
    if (lane_idx == 0) {
      smem.valid_rows[ring.stage] = -1;
      mbarrier_arrive(smem.codes_full + 8 * ring.stage);
    }
  }

  // Warps 2 and 3: convert each key tile's K, then its V.
  __device__ __forceinline__ void convert() const {
    PipelineState<kCodeStages> codes(0);
    for (PipelineState<kStages> ring(1);; ring.advance()) {
      if (!convert_tile(codes, smem.k + ring.stage * kKeyBytes, smem.k_full + 8 * ring.stage,
                        smem.k_empty + 8 * ring.stage, ring.phase))
        return;
      convert_tile(codes, smem.v + ring.stage * kKeyBytes, smem.v_full + 8 * ring.stage,
                   smem.v_empty + 8 * ring.stage, ring.phase);
    }
  }

 private:
  __device__ __forceinline__ void load_tile(PipelineState<kCodeStages>& ring, const TensorMap* map,
                                            int row, int lane_idx, int valid) const {
    const unsigned full = smem.codes_full + 8 * ring.stage;
    // SAFETY: the previous reads of this stage were ordinary loads.
    mbarrier_wait_to_overwrite(smem.codes_empty + 8 * ring.stage, ring.phase);
    if (lane_idx == 0) {
      smem.valid_rows[ring.stage] = valid;
      mbarrier_arrive_expect_tx(full, kCodeBytes);
    }
    __syncwarp();
    if (lane_idx * problem.box_keys < kKeys)
      tma_load_3d(smem.codes + ring.stage * kCodeBytes + lane_idx * problem.box_keys * kHeadDim,
                  map, 0, 0, row, full);
    ring.advance();
  }

  // Converts one tile; returns false if none is left.
  __device__ __forceinline__ bool convert_tile(PipelineState<kCodeStages>& codes, unsigned to,
                                               unsigned full, unsigned empty,
                                               unsigned phase) const {
    constexpr int kWords = kHeadDim / 16;
    mbarrier_wait(smem.codes_full + 8 * codes.stage, codes.phase);
    const int valid = smem.valid_rows[codes.stage];
    if (valid < 0) return false;
    const unsigned from = smem.codes + codes.stage * kCodeBytes;
    mbarrier_wait(empty, phase);
    const int thread = threadIdx.x % kConvertingThreads;
    static_assert(!kHasCodes || kKeys * kWords % kConvertingThreads == 0, "no thread is left out");
#pragma unroll 2
    for (int i = thread; i < kKeys * kWords; i += kConvertingThreads) {
      const int row = i / kWords, word = i % kWords;
      unsigned x[4], y[8];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(from + code_offset(row, word))
                   : "memory");
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // P is 0 for keys past the end, but 0 * NaN would reach the sum.
        codes_to_registers(row < valid ? x[j] : 0u, y[2 * j], y[2 * j + 1]);
      }
      const unsigned chunk = to + word / 4 * kKeyChunk + row * 128;
      const int place = word % 4 * 2;
      st_shared_v4(chunk + (place ^ row % 8) * 16, y[0], y[1], y[2], y[3]);
      st_shared_v4(chunk + ((place + 1) ^ row % 8) * 16, y[4], y[5], y[6], y[7]);
    }
    fence_async_proxy();  // SAFETY: wgmma reads the data written here.
    mbarrier_arrive(full);
    mbarrier_arrive(smem.codes_empty + 8 * codes.stage);
    codes.advance();
    return true;
  }
};
