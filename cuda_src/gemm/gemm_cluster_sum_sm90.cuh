// Split-k within a cluster: kClusterK CTAs share a sum over k and exchange partials through
// distributed shared memory.
//
// CTA i finishes column slice i. Each thread sends its sums of the other slices to the thread with
// the same index in the CTA that finishes them, 16 bytes at a time, and adds the sums it receives
// to its own, in CTA order.
#pragma once

#include "gemm/gemm_pipeline_sm90.cuh"
#include "gemm/gemm_scheduler_sm90.cuh"

constexpr int kSliceSums = kSlice / 2, kSliceVecs = kSlice / 8;

__device__ __forceinline__ unsigned sums_offset(int sender, int receiver, int vec) {
  const int place = sender - (sender > receiver);
  return ((place * kSliceVecs + vec) * kConsumerThreads + threadIdx.x - kFirstConsumer) * 16;
}

__device__ __forceinline__ void exchange_sums(const Pipeline& p, const TileScheduler& s,
                                              const unsigned char* sums,
                                              const float (&acc)[kWarpgroupCols / 2],
                                              float (&own)[kSliceSums]) {
  const int rank = s.rank_m + kClusterM * s.rank_n, me = s.rank_k;
#pragma unroll
  for (int to = 0; to < kClusterK; ++to) {
    const float* a = acc + to * kSliceSums;
    if (to == me) {
#pragma unroll
      for (int i = 0; i < kSliceSums; ++i) own[i] = a[i];
      continue;
    }
#pragma unroll
    for (int i = 0; i < kSliceVecs; ++i)
      st_async(p.sums + sums_offset(me, to, i), p.sums_barrier, rank + to * kClusterM * kClusterN,
               a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]);
  }
  mbarrier_wait_cluster(p.sums_barrier, 0);
#pragma unroll
  for (int i = 0; i < kSliceVecs; ++i) {
    Vec<float, 4> sum = {};
#pragma unroll
    for (int from = 0; from < kClusterK; ++from) {
      Vec<float, 4> part = {own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]};
      if (from != me)
        part = load_vec<float, 4>(reinterpret_cast<const float*>(sums + sums_offset(from, me, i)));
#pragma unroll
      for (int c = 0; c < 4; ++c) sum.v[c] += part.v[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) own[4 * i + c] = sum.v[c];
  }
}
