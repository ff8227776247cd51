// How the parts of a sequence become its result in attention_decode_sm90: always in the same order.
#pragma once

#include "attention_decode/consumer.cuh"

// Past L1, which does not see what other blocks write.
template <int N>
__device__ __forceinline__ Vec<float, N> load_of_others(const float* p) {
  Vec<float, N> x;
  if constexpr (N == 4)
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "l"(p));
  else
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.v[0]), "=f"(x.v[1]) : "l"(p));
  return x;
}

template <int kColumns>
__device__ __forceinline__ void write_row(const Output& output, int row, int column, float base,
                                          float sum, const float (&o)[kColumns]) {
  if (column == 0) output.row(row, base, sum);
  const float factor = output.factor(sum);
  Vec<scalar_t, kColumns> result;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) result.v[c] = from_float<scalar_t>(o[c] * factor);
  store_vec(output.at(row) + column, result);
}

// The rows of a sequence without keys, by the computing warps.
__device__ __forceinline__ void write_empty(const Output& output, int num_rows) {
  constexpr int kWords = kHeadDim / 4;
  constexpr float kZeros[4] = {};
#pragma unroll 1
  for (int i = threadIdx.x; i < num_rows * kWords; i += kKeyWarps * kWarpSize)
    write_row<4>(output, i / kWords, i % kWords * 4, -kInf, 0.0f, kZeros);
}

// By the block that came last: a warp takes kBatchRows rows at once, and kBatch parts of each,
// whose loads are all under way together.
template <int kBatchRows, int kBatch>
__device__ __forceinline__ void combine(const Partials& partials, const Parts& parts,
                                        const Output& output) {
  constexpr int kColumns = kHeadDim / kWarpSize, kLoads = kBatchRows * kBatch;
  static_assert(kLoads <= kWarpSize, "a lane holds one part's statistics");
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int row = threadIdx.x / kWarpSize * kBatchRows; row < partials.num_rows;
       row += kKeyWarps * kBatchRows) {
    const auto clamped = [&](int r) { return min(row + r, partials.num_rows - 1); };
    float base = -kInf, sum = 0.0f;  // of row lane / kBatch
    float o[kBatchRows][kColumns] = {};
#pragma unroll 1
    for (int first = 0; first < parts.count; first += kBatch) {
      Vec<float, kColumns> part[kLoads];
      Vec<float, 2> stats{-kInf, 0.0f};
      if (lane < kLoads && first + lane % kBatch < parts.count)
        stats = load_of_others<2>(partials.at(parts.slot(first + lane % kBatch)).stats +
                                  clamped(lane / kBatch) * 2);
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        part[i] = load_of_others<kColumns>(
            partials.at(parts.slot(min(first + i % kBatch, parts.count - 1)))
                .at(clamped(i / kBatch)) +
            lane * kColumns);
      float top = fmaxf(base, stats.v[0]);
#pragma unroll
      for (int offset = kBatch / 2; offset > 0; offset /= 2)
        top = fmaxf(top, __shfl_xor_sync(kFullMask, top, offset));
      const float weight = exp2_approx(stats.v[0] - finite_or_zero(top));
      const float shrink = exp2_approx(base - finite_or_zero(top));
      base = top;
      sum = sum * shrink + stats.v[1] * weight;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const float w = __shfl_sync(kFullMask, weight, i);
        const float s = i % kBatch == 0 ? __shfl_sync(kFullMask, shrink, i) : 1.0f;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          float& x = o[i / kBatch][c];
          x = (i % kBatch == 0 ? x * s : x) + part[i].v[c] * w;
        }
      }
    }
#pragma unroll
    for (int offset = kBatch / 2; offset > 0; offset /= 2)
      sum += __shfl_xor_sync(kFullMask, sum, offset);
#pragma unroll
    for (int r = 0; r < kBatchRows; ++r) {
      const float row_base = __shfl_sync(kFullMask, base, r * kBatch);
      const float row_sum = __shfl_sync(kFullMask, sum, r * kBatch);
      if (row + r < partials.num_rows)
        write_row<kColumns>(output, row + r, lane * kColumns, row_base, row_sum, o[r]);
    }
  }
}

// ---- clusters: the parts of a sequence stay in the shared memory of its blocks -----------------

// Columns of a row of the parts of all ranks, added up by their weights.
template <int N>
struct ClusterSum {
  float base = -kInf, sum = 0.0f, o[N] = {};

  __device__ __forceinline__ ClusterSum(const Vec<float, 2> (&stats)[kCluster],
                                        const Vec<float, N> (&part)[kCluster]) {
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) base = fmaxf(base, stats[rank].v[0]);
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) {
      const float weight = exp2_approx(stats[rank].v[0] - finite_or_zero(base));
      sum += stats[rank].v[1] * weight;
#pragma unroll
      for (int c = 0; c < N; ++c) o[c] += part[rank].v[c] * weight;
    }
  }
};

__device__ __forceinline__ unsigned address_of_rank(unsigned address, int rank) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Few rows: a part's columns are sent to the blocks that add them up, rank r those from
// r D / kCluster on.
// They lie outside of the ring: a block may still compute when others send. A writer (see Output).
//
// An mbarrier counts what has come. Barriers of the cluster would do instead, at the price of two
// fences of all memory, those to the pages too.
struct Inbox {
  unsigned char* smem;

  static constexpr int kShare = kHeadDim / kCluster;  // columns of a block

  // By one thread; before others send, the cluster must know that it was done.
  __device__ __forceinline__ void init(int num_rows) const {
    mbarrier_init(barrier(), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(barrier(), num_rows * kCluster * (kShare * 4 + 8));
  }
  __device__ __forceinline__ void wait() const { mbarrier_wait_cluster(barrier(), 0); }

  // Where the columns of one row are that rank `from` sent to rank `to`, and their base and sum.
  // racecheck sees addresses, not blocks: what a block sends to others has places of its own each.
  __device__ static __forceinline__ int columns_at(int row, int from, int to) {
    return kInboxAt + (row * kCluster + (from + to) % kCluster) * kShare * 4;
  }
  __device__ static __forceinline__ int stats_at(int row, int from, int to) {
    return kInboxAt + kRows * kHeadDim * 4 + (row * kCluster + (from + to) % kCluster) * 8;
  }

  __device__ __forceinline__ void row(int row, float base, float sum) const {
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank)
      send(stats_at(row, blockIdx.x % kCluster, rank), rank, base, sum);
  }
  __device__ __forceinline__ float factor(float) const { return 1.0f; }
  __device__ __forceinline__ int at(int row) const { return row; }
  __device__ __forceinline__ void pair(int row, int column, float x, float y) const {
    const int to = column / kShare;
    send(columns_at(row, blockIdx.x % kCluster, to) + column % kShare * 4, to, x, y);
  }

 private:
  __device__ __forceinline__ unsigned barrier() const {
    return smem_address(smem) + kInboxBarrierAt;
  }
  __device__ __forceinline__ void send(int at, int rank, float x, float y) const {
    cluster_send(smem_address(smem) + at, barrier(), rank, x, y);
  }
};

// Each block of the cluster adds up its columns of all rows.
__device__ __forceinline__ void combine_inbox(const unsigned char* smem, int num_rows,
                                              const Output& output) {
  constexpr int kWords = Inbox::kShare / 4;
  const int row = threadIdx.x / kWords, column = threadIdx.x % kWords * 4;
  const int own = blockIdx.x % kCluster;
  static_assert(!kSends || kRows * kWords <= kKeyWarps * kWarpSize, "a word a thread");
  if (row >= num_rows) return;
  const auto at = [&](int place) { return reinterpret_cast<const float*>(smem + place); };
  Vec<float, 2> stats[kCluster];
  Vec<float, 4> part[kCluster];
#pragma unroll
  for (int rank = 0; rank < kCluster; ++rank) {
    stats[rank] = load_vec<float, 2>(at(Inbox::stats_at(row, rank, own)));
    part[rank] = load_vec<float, 4>(at(Inbox::columns_at(row, rank, own)) + column);
  }
  const ClusterSum<4> all(stats, part);
  const int first = own * Inbox::kShare;
  write_row<4>(output, row, first + column, all.base, all.sum, all.o);
}

// Many rows: over the ring, which nobody needs any more, for the others to fetch.
__device__ __forceinline__ PartialOutput cluster_partial(unsigned char* smem) {
  float* const o = reinterpret_cast<float*>(smem);
  return PartialOutput{o, o + kRows * kHeadDim};
}

template <int N>
__device__ __forceinline__ Vec<float, N> load_of_rank(unsigned address, int rank) {
  const unsigned remote = address_of_rank(address, rank);
  Vec<float, N> x;
  if constexpr (N == 4)
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "r"(remote)
                 : "memory");
  else
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.v[0]), "=f"(x.v[1])
                 : "r"(remote)
                 : "memory");
  return x;
}

// Each block of the cluster adds up its share of all rows' columns.
__device__ __forceinline__ void combine_cluster(unsigned char* smem, int num_rows,
                                                const Output& output) {
  constexpr int kWords = kHeadDim / 4;
  const PartialOutput mine = cluster_partial(smem);
  const int share = (num_rows * kWords + kCluster - 1) / kCluster;
  const int begin = blockIdx.x % kCluster * share;
  const int end = min(begin + share, num_rows * kWords);
#pragma unroll 1
  for (int i = begin + threadIdx.x; i < end; i += kKeyWarps * kWarpSize) {
    const int row = i / kWords, column = i % kWords * 4;
    Vec<float, 2> stats[kCluster];
    Vec<float, 4> part[kCluster];
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) {
      stats[rank] = load_of_rank<2>(smem_address(mine.stats + row * 2), rank);
      part[rank] = load_of_rank<4>(smem_address(mine.at(row) + column), rank);
    }
    const ClusterSum<4> all(stats, part);
    write_row<4>(output, row, column, all.base, all.sum, all.o);
  }
}
