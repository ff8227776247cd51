// The scan (gated_delta_scan.cuh) with a producer warpgroup: it copies the chunks to a ring of
// stages, so the consumers, one warpgroup per 64 features, spend no instructions on copies and do
// not wait for each other.
#pragma once

#include "common/pipeline_state.cuh"
#include "common/sm90.cuh"
#include "gated_delta/gated_delta_products_sm90.cuh"
#include "gated_delta/gated_delta_scan.cuh"

constexpr int kProducerThreads = 128;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;

template <int kSlice, int kStages>
struct ScanRing {
  ScanStage<kSlice> stages[kStages];
  uint64_t full[kStages], empty[kStages];

  static constexpr int kConsumers = kSlice / 16;  // warps
  static constexpr int kThreads = kConsumers * kWarpSize + kProducerThreads;
  // Three warpgroups have 168 registers per thread, too few to consume.
  static constexpr bool kMovesRegisters = kThreads > 256;
};

// Zeros the blocks above the diagonal, which copy_triangle leaves as they are: wgmma reads them.
template <int kSlice>
__device__ __forceinline__ void clear_upper_blocks(ScanStage<kSlice>& stage) {
  for (int i = threadIdx.x; i < kChunkTokens * kChunkTokens / kVec; i += blockDim.x) {
    const int row = i / (kChunkTokens / kVec), column = i % (kChunkTokens / kVec) * kVec;
    const uint32_t at = tile_address(0, row, column);
    if (column / 16 <= row / 16) continue;
    *reinterpret_cast<uint4*>(stage.inverse + at) = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(stage.reads + at) = make_uint4(0, 0, 0, 0);
  }
}

// Copies to shared memory are ordinary accesses, wgmma's are not. So a thread of the producer waits
// for its copies of a chunk, fences them, and only then arrives on the stage's `full`; meanwhile it
// has started those of the next chunk, if there is a stage to spare. A fence by the consumers would
// wait for their stores to global memory, too. Consumers arrive on `empty` when they have read a
// stage. One arrival per warp would suffice, but compute-sanitizer then reports races.
template <int kSlice, int kStages>
__device__ __forceinline__ void produce_chunks(const Scan<kSlice>& scan,
                                               ScanRing<kSlice, kStages>& ring) {
  constexpr int kBehind = kStages > 2 ? 1 : 0;  // chunks started after the one that is awaited
  const auto publish = [&](int chunk) {
    fence_async_proxy();
    mbarrier_arrive(smem_address(&ring.full[chunk % kStages]));
  };
  const int thread = threadIdx.x % kProducerThreads, count = scan.range.end - scan.range.begin;
  PipelineState<kStages> state(1);
#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk, state.advance()) {
    mbarrier_wait(smem_address(&ring.empty[state.stage]), state.phase);
    scan.template load<kProducerThreads>(ring.stages[state.stage], scan.range.begin + chunk,
                                         thread);
    cp_async_commit();
    cp_async_wait<kBehind>();
    if (chunk >= kBehind) publish(chunk - kBehind);
  }
  cp_async_wait<0>();
  if (kBehind > 0) publish(count - 1);
}

template <int kSlice, int kStages>
__device__ __forceinline__ void consume_chunks(const Scan<kSlice>& scan,
                                               ScanRing<kSlice, kStages>& ring) {
  ScanWalk<WgmmaProducts, kSlice> walk(scan);
  PipelineState<kStages> state(0);
#pragma unroll 1
  for (int index = scan.range.begin; index < scan.range.end; ++index, state.advance()) {
    mbarrier_wait(smem_address(&ring.full[state.stage]), state.phase);
    walk.advance(ring.stages[state.stage], index);
    mbarrier_arrive(smem_address(&ring.empty[state.stage]));
  }
  walk.end();
}

template <int kSlice, int kStages>
__device__ __forceinline__ void scan_chunks_sm90(const GatedDeltaParams& p, unsigned char* smem) {
  using Ring = ScanRing<kSlice, kStages>;
  Ring& ring = *reinterpret_cast<Ring*>(smem);
  pdl_trigger();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(smem_address(&ring.full[stage]), kProducerThreads);
      mbarrier_init(smem_address(&ring.empty[stage]), Ring::kConsumers * kWarpSize);
    }
    mbarrier_init_fence();
  }
  for (ScanStage<kSlice>& stage : ring.stages) clear_upper_blocks(stage);
  fence_async_proxy();
  __syncthreads();
  pdl_wait();
  const Scan<kSlice> scan(p);
  if (scan.range.begin >= scan.range.end) return;
  if (uniform_warp_idx() >= Ring::kConsumers) {
    if constexpr (Ring::kMovesRegisters) warpgroup_reg_dealloc<kProducerRegisters>();
    produce_chunks(scan, ring);
  } else {
    if constexpr (Ring::kMovesRegisters) warpgroup_reg_alloc<kConsumerRegisters>();
    consume_chunks(scan, ring);
  }
}
