// Exchange of partials between a cluster's CTAs through distributed shared memory. Partials are
// pushed if they fit beside the ring, otherwise pulled.
#pragma once

#include "attention_decode/attention_decode_combine_sm90.cuh"

// Weighted sum of all ranks' partials for N columns of a row.
template <int N>
struct ClusterSum {
  float base = -kInf, sum = 0.0f, o[N] = {};

  __device__ __forceinline__ ClusterSum(const Vec<float, 2> (&stats)[kCluster],
                                        const Vec<float, N> (&partial)[kCluster]) {
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) base = fmaxf(base, stats[rank].v[0]);
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) {
      const float weight = exp2_approx(stats[rank].v[0] - finite_or_zero(base));
      sum += stats[rank].v[1] * weight;
#pragma unroll
      for (int c = 0; c < N; ++c) o[c] += partial[rank].v[c] * weight;
    }
  }
};

// ---- push: few rows ----------------------------------------------------------------------------

// Sends each CTA the columns that it combines; same interface as Output. Rank r combines the kShare
// columns from r * kShare on. They land outside the ring, as the receiver may still be computing.
//
// An mbarrier counts the bytes. Cluster barriers would also work, but would fence all memory twice,
// including the stores to the pages.
struct PushedPartials {
  unsigned char* smem;

  static constexpr bool kIsResult = false;
  static constexpr int kShare = kHeadDim / kCluster;  // columns per CTA

  // One thread calls it. A cluster barrier must follow before other CTAs send.
  __device__ __forceinline__ void init(int num_rows) const {
    mbarrier_init(barrier(), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(barrier(), num_rows * kCluster * (kShare * 4 + 8));
  }
  __device__ __forceinline__ void wait() const { mbarrier_wait_cluster(barrier(), 0); }

  // Shared-memory offsets of a row's columns sent by rank `from` to rank `to`, and of their base
  // and sum. NOTE: racecheck compares offsets without regard to the CTA, so each pair of ranks has
  // its own offsets.
  __device__ static __forceinline__ int columns_at(int row, int from, int to) {
    return kInboundAt + (row * kCluster + (from + to) % kCluster) * kShare * 4;
  }
  __device__ static __forceinline__ int stats_at(int row, int from, int to) {
    return kInboundAt + kRows * kHeadDim * 4 + (row * kCluster + (from + to) % kCluster) * 8;
  }

  __device__ __forceinline__ void row(int row, float base, float sum) const {
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank)
      send(stats_at(row, blockIdx.x % kCluster, rank), rank, base, sum);
  }
  __device__ __forceinline__ float factor(int, float, float) const { return 1.0f; }
  __device__ __forceinline__ int at(int row) const { return row; }
  __device__ __forceinline__ void pair(int row, int column, float x, float y) const {
    const int to = column / kShare;
    send(columns_at(row, blockIdx.x % kCluster, to) + column % kShare * 4, to, x, y);
  }

 private:
  __device__ __forceinline__ unsigned barrier() const {
    return smem_address(smem) + kInboundBarrierAt;
  }
  __device__ __forceinline__ void send(int at, int rank, float x, float y) const {
    st_async(smem_address(smem) + at, barrier(), rank, x, y);
  }
};

// Each CTA of the cluster combines its columns of all rows.
__device__ __forceinline__ void combine_pushed(const unsigned char* smem, int num_rows,
                                               const Output& output) {
  constexpr int kWords = PushedPartials::kShare / 4;
  constexpr int kRounds = (kRows * kWords + kConsumerThreads - 1) / kConsumerThreads;
  const int own = blockIdx.x % kCluster;
  const auto at = [&](int offset) { return reinterpret_cast<const float*>(smem + offset); };
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const unsigned i = round * kConsumerThreads + threadIdx.x;
    const int row = i / kWords, column = i % kWords * 4;
    if (row >= num_rows) return;
    Vec<float, 2> stats[kCluster];
    Vec<float, 4> partial[kCluster];
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) {
      stats[rank] = load_vec<float, 2>(at(PushedPartials::stats_at(row, rank, own)));
      partial[rank] = load_vec<float, 4>(at(PushedPartials::columns_at(row, rank, own)) + column);
    }
    const ClusterSum<4> all(stats, partial);
    const int first = own * PushedPartials::kShare;
    write_row<4>(output, row, first + column, all.base, all.sum, all.o);
  }
}

// ---- pull: many rows ---------------------------------------------------------------------------

// This CTA's partial, stored over the ring, which is no longer in use.
__device__ __forceinline__ PartialOutput cluster_partial(unsigned char* smem) {
  float* const o = reinterpret_cast<float*>(smem);
  return PartialOutput{o, o + kRows * kHeadDim};
}

// Each CTA of the cluster combines its share of all rows' columns.
__device__ __forceinline__ void combine_pulled(unsigned char* smem, int num_rows,
                                               const Output& output) {
  constexpr int kWords = kHeadDim / 4;
  const PartialOutput own = cluster_partial(smem);
  const int share = (num_rows * kWords + kCluster - 1) / kCluster;
  const int begin = blockIdx.x % kCluster * share;
  const int end = min(begin + share, num_rows * kWords);
#pragma unroll 1
  for (int i = begin + threadIdx.x; i < end; i += kConsumerThreads) {
    const int row = i / kWords, column = i % kWords * 4;
    Vec<float, 2> stats[kCluster];
    Vec<float, 4> partial[kCluster];
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) {
      stats[rank] = ld_shared_cluster<2>(smem_address(own.stats + row * 2), rank);
      partial[rank] = ld_shared_cluster<4>(smem_address(own.at(row) + column), rank);
    }
    const ClusterSum<4> all(stats, partial);
    write_row<4>(output, row, column, all.base, all.sum, all.o);
  }
}
