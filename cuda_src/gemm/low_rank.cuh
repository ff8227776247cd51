// LoRA adapters in a GEMM's epilogue: b[s] h[t] + bias[s] is added to a warp's sums of the product,
// for the adapter s of each row t.
//
// A warp holds 16 rows of sums in the order of mma.sync's and wgmma's accumulators, so that
// mma.sync adds to them in registers. The rows may have different adapters: the warp multiplies its
// 16 rows by the matrix of each adapter among them, with zeros for the other adapters' rows.
//
// Numerics: lora_expand's, but the total is not rounded before the GEMM's sums are added: the
// partial sums of h are added in order and rounded to scalar_t; products and bias in float.
#pragma once

#include "common/epilogue.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"

constexpr int kMaxParts = 8;

// The epilogue of a GEMM without adapters.
struct NoLowRank {
  template <bool kPrefetches, int kSums>
  __device__ __forceinline__ void add(const Epilogue&, float (&)[kSums], int, int, int, int) const {
  }
};

struct LowRank {
  const float* h;        // (P, M, h_columns), contiguous, 16-byte aligned
  const scalar_t* b;     // (S, N, rank), contiguous, 8-byte aligned; rank is a multiple of 16
  const scalar_t* bias;  // (S, N), contiguous; null: none
  const int* has_bias;   // (S,) 0: the adapter's bias is zeros; null: each may have one
  const int* slots;      // (M,) adapter of each row; no adapter: outside [0, S)
  int num_splits, num_adapters, rank, h_columns;  // P, S, r, parts * r
  // Ends of the parts in the rows of b; those of parts that do not exist are N.
  int bounds[kMaxParts];

  // Computed anew at each use: hoisted, what follows from it would take registers of the products.
  __device__ __forceinline__ static int lane_idx() {
    int lane_idx = threadIdx.x % kWarpSize;
    asm volatile("" : "+r"(lane_idx));
    return lane_idx;
  }

  // The adapter of a row; num_adapters: none.
  __device__ __forceinline__ int slot(int row, int m) const {
    const unsigned slot = row < m ? slots[row] : num_adapters;
    return min(slot, static_cast<unsigned>(num_adapters));
  }

  // The first adapter of the warp's rows, whose adapters in this lane are `own`, from `from` on.
  __device__ __forceinline__ int next(const int (&own)[2], int from) const {
    const int first = own[0] >= from ? own[0] : num_adapters;
    return __reduce_min_sync(kFullMask, own[1] >= from ? min(own[1], first) : first);
  }

  // Adds to the sums of the rows from `row` and the product's columns from `col` on.
  // kPrefetches: read an adapter's matrix while the previous one is multiplied.
  template <bool kPrefetches, int kSums>
  __device__ __forceinline__ void add(const Epilogue& e, float (&acc)[kSums], int row, int col,
                                      int m, int n) const {
    LowRank here = *this;
    asm volatile("" : "+r"(here.rank), "+r"(here.h_columns), "+r"(m), "+r"(n));
    here.add_here<kPrefetches>(e, acc, row, col, m, n);
  }

 private:
  template <bool kPrefetches, int kSums>
  __device__ __forceinline__ void add_here(const Epilogue& e, float (&acc)[kSums], int row, int col,
                                           int m, int n) const {
    const int g = lane_idx() / 4;
    const int rows[2] = {row + g, row + g + 8};
    const int own[2] = {slot(rows[0], m), slot(rows[1], m)};
    const int first = next(own, 0);
    if (first == num_adapters) return;
    ask_for<kSums * 2>(e, first, col, n);
    int begin = 0;
#pragma unroll 1
    for (int part = 0; part < h_columns / rank; ++part) {
      const int end = end_of(part);
      constexpr int kPairs = (kSums + 4) / 8;  // the last may lack its second group
      const Groups groups(e, col, begin, min(end, n), kPairs);
      begin = end;
      if (groups.is_empty()) continue;
#pragma unroll 1
      for (int k = 0; k < rank + (bias != nullptr ? kStep : 0); k += kStep) {
        uint2 values[2] = {one(), one()};  // after the last step of rank: the bias, times 1
        if (k < rank) load_h<kPrefetches ? 8 : 2>(rows, own, part, k, m, values);
        multiply<kPrefetches, 0>(acc, values, own, first, groups, n, k);
      }
    }
  }

  static constexpr int kStep = 16;  // values of rank per mma

  // The end of a part's rows of b: registers cannot be indexed.
  __device__ __forceinline__ int end_of(int part) const {
    int end = bounds[0];
#pragma unroll
    for (int i = 1; i < kMaxParts; ++i)
      if (i == part) end = bounds[i];
    return end;
  }

  // Groups of 8 columns whose loads are in flight: large tiles have few registers.
  template <bool kPrefetches>
  static constexpr int kGroups = kPrefetches ? 8 : 4;

  // A tile's groups of 8 columns that belong to a part. Pair i is groups 2 i and 2 i + 1; the rows
  // of b are row[parity] + i * step, for i from begin[parity] to end[parity].
  struct Groups {
    int row[2], begin[2], end[2], step;

    __device__ __forceinline__ Groups(const Epilogue& e, int col, int part_begin, int part_end,
                                      int pairs)
        : step(e.num_gates > 0 ? 8 : 16) {
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        row[parity] = e.bias_index(col + parity * 8);
        begin[parity] = max(0, (part_begin - row[parity] + step - 1) / step);
        end[parity] = min(pairs, max(0, part_end - row[parity] + step - 1) / step);
      }
    }
    __device__ __forceinline__ bool is_empty() const {
      return begin[0] >= end[0] && begin[1] >= end[1];
    }
    __device__ __forceinline__ bool has(int group) const {
      return group / 2 >= begin[group % 2] && group / 2 < end[group % 2];
    }
  };

  // 1 in the first value of rank.
  __device__ __forceinline__ static uint2 one() {
    return make_uint2(lane_idx() % 4 == 0 ? pack2<scalar_t>(1.0f, 0.0f) : 0, 0);
  }

  // Asks the L1 cache, which the warps of a tile share, for the rows of b of kWidth columns.
  template <int kWidth>
  __device__ __forceinline__ void ask_for(const Epilogue& e, int adapter, int col, int n) const {
    const int64_t size = static_cast<int64_t>(n) * rank;
    const int lines = rank / 8;  // cache lines of 128 bytes per 8 rows
#pragma unroll 1
    for (int i = lane_idx(); i < kWidth / 8 * lines; i += kWarpSize) {
      const int column = col + i / lines * 8;
      if (column >= n) break;
      const int64_t at = static_cast<int64_t>(e.bias_index(column)) * rank + i % lines * 64;
      if (at >= size) break;
      asm volatile("prefetch.global.L1 [%0];" ::"l"(b + adapter * size + at));
    }
  }

  // Sums this lane's four values of h of kCount rows over the splits, kAtOnce of which are loaded
  // together, and rounds them; zeros for rows without an adapter. Lane 4 g + t holds values 4 t to
  // 4 t + 3: mma sums over k, so that a register may stand for any k if both operands agree.
  template <int kAtOnce, int kCount>
  __device__ __forceinline__ void load_h(const int (&row)[kCount], const int (&own)[kCount],
                                         int part, int k, int m, uint2 (&values)[kCount]) const {
    Vec<float, 4> sum[kCount] = {};
    const float* from = h + part * rank + k + lane_idx() % 4 * 4;
    const int64_t stride = static_cast<int64_t>(m) * h_columns;
#pragma unroll 1
    for (int split = 0; split < num_splits; split += kAtOnce, from += kAtOnce * stride) {
      Vec<float, 4> x[kAtOnce][kCount];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int r = 0; r < kCount; ++r)
          if (split + i < num_splits && own[r] < num_adapters)
            x[i][r] =
                load_vec<float, 4>(from + i * stride + static_cast<int64_t>(row[r]) * h_columns);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int r = 0; r < kCount; ++r)
          if (split + i < num_splits && own[r] < num_adapters)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[r].v[j] += x[i][r].v[j];
    }
#pragma unroll
    for (int r = 0; r < kCount; ++r)
      values[r] = make_uint2(pack2<scalar_t>(sum[r].v[0], sum[r].v[1]),
                             pack2<scalar_t>(sum[r].v[2], sum[r].v[3]));
  }

  // Loads this lane's values of groups kFirst to kFirst + kCount - 1; k == rank: the bias.
  template <int kFirst, int kCount, int kLoads>
  __device__ __forceinline__ void load_b(Groups groups, int adapter, int n, int k,
                                         uint2 (&w)[kLoads]) const {
    // Computed anew in every iteration: hoisted, the addresses would take all registers.
    asm volatile("" : "+r"(groups.row[0]), "+r"(groups.row[1]), "+r"(groups.step));
    const int g = lane_idx() / 4, t = lane_idx() % 4;
    const bool is_bias = k == rank;
    const int64_t first = static_cast<int64_t>(adapter) * n;
    const bool reads = !is_bias || (t == 0 && (has_bias == nullptr || has_bias[adapter] != 0));
    const auto load = [&](auto of_row) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int row = groups.row[i % 2] + (kFirst + i) / 2 * groups.step + g;
        const bool exists = reads && groups.has(kFirst + i) && row < n;
        w[i] = exists ? of_row(first + row) : make_uint2(0, 0);
      }
    };
    if (is_bias)
      load([&](int64_t row) {
        return make_uint2(*reinterpret_cast<const unsigned short*>(bias + row), 0);
      });
    else
      load(
          [&](int64_t row) { return *reinterpret_cast<const uint2*>(b + row * rank + k + t * 4); });
  }

  template <bool kPrefetches, int kFirst, int kSums>
  __device__ __forceinline__ void multiply(float (&acc)[kSums], const uint2 (&values)[2],
                                           const int (&own)[2], int first, const Groups& groups,
                                           int n, int k) const {
    static_assert(kFirst % 2 == 0, "whole pairs");
    constexpr int kLoads = kGroups<kPrefetches>, kLeft = kSums / 4 - kFirst;
    constexpr int kCount = kLeft < kLoads ? kLeft : kLoads;
    uint2 w[kLoads];
    if constexpr (kPrefetches) load_b<kFirst, kCount>(groups, first, n, k, w);
#pragma unroll 1
    for (int s = first; s < num_adapters;) {
      const int following = next(own, s + 1);
      if (!kPrefetches && k == rank && has_bias != nullptr && has_bias[s] == 0) {
        s = following;
        continue;
      }
      if constexpr (!kPrefetches) load_b<kFirst, kCount>(groups, s, n, k, w);
      uint2 after[kLoads];
      if constexpr (kPrefetches)
        if (following < num_adapters) load_b<kFirst, kCount>(groups, following, n, k, after);
      const bool low = own[0] == s, high = own[1] == s;
      const uint32_t a[4] = {low ? values[0].x : 0, high ? values[1].x : 0, low ? values[0].y : 0,
                             high ? values[1].y : 0};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!groups.has(kFirst + i)) continue;  // the sums of other parts stay as they are
        float* const sums = acc + (kFirst + i) * 4;
        float d[4] = {sums[0], sums[1], sums[2], sums[3]};
        const uint32_t operand[2] = {w[i].x, w[i].y};
        mma_m16n8k16<scalar_t>(d, a, operand);
        sums[0] = d[0], sums[1] = d[1], sums[2] = d[2], sums[3] = d[3];
      }
      if constexpr (kPrefetches) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) w[i] = after[i];
      }
      s = following;
    }
    if constexpr (kFirst + kCount < kSums / 4)
      multiply<kPrefetches, kFirst + kCount>(acc, values, own, first, groups, n, k);
  }
};

template <typename Params>
__device__ __forceinline__ LowRank low_rank_of(const Params& p) {
  return {p.h,
          p.b,
          p.adapter_bias,
          p.has_bias,
          p.slots,
          p.num_splits,
          p.num_adapters,
          p.rank,
          p.h_columns,
          {p.bound0, p.bound1, p.bound2, p.bound3, p.bound4, p.bound5, p.bound6, p.bound7}};
}
