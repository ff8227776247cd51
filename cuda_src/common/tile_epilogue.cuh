// Stores of the portable tiles (mma_tile.cuh, simt_tile.cuh). Sums are staged in shared memory so
// that global memory is written in whole lines.
#pragma once

#include "common/epilogue.cuh"
#include "common/reduce.cuh"  // kWarpSize

// 16 rows of a tile from (row0, col0) on, staged as floats with kPitch floats per row. kThreads
// threads share the slice (`thread` is 0 .. kThreads - 1); each takes groups of four columns.
template <int kCols_, int kPitch_, int kThreads_, bool kMayGate_ = true>
struct Slice {
  static constexpr bool kMayGate = kMayGate_;  // false in kernels without registers to spare
  static constexpr int kCols = kCols_, kPitch = kPitch_, kThreads = kThreads_;
  static constexpr int kGroups = 16 * kCols / 4 / kThreads;
  static constexpr int kBatch = kGroups < 4 ? kGroups : 4;  // groups with loads in flight together
  static_assert(kGroups * kThreads * 4 == 16 * kCols && kGroups % kBatch == 0,
                "threads do not divide the slice");

  float* smem;
  int thread, row0, col0, m, n;

  __device__ __forceinline__ int row(int group) const {
    return (group * kThreads + thread) / (kCols / 4);
  }
  __device__ __forceinline__ int col(int group) const {
    return (group * kThreads + thread) % (kCols / 4) * 4;
  }
  __device__ __forceinline__ bool exists(int group) const {
    return row0 + row(group) < m && col0 + col(group) < n;
  }
  __device__ __forceinline__ float* at(int group) const {
    return smem + row(group) * kPitch + col(group);
  }
};

// Applies bias and activation in place. The loop stays rolled because its code is long and not
// time-critical. If gated, a thread reads up values from other threads' groups, which no thread
// writes here, and replaces only its own groups of gate.
template <typename S>
__device__ __forceinline__ void activate_slice(const Epilogue& e, const S& s) {
#pragma unroll 1
  for (int i = 0; i < S::kGroups * 4; ++i) {
    const int col = s.col0 + s.col(i / 4) + i % 4;
    float* p = s.at(i / 4) + i % 4;
    if (col >= s.n) continue;
    if (!S::kMayGate || !e.is_gated())
      *p = e.biased(col, *p);
    else if (col % 16 < 8)
      *p = e.gated(col, *p, p[8]);
  }
}

template <typename Out, typename S>
__device__ __forceinline__ void store_slice_as(const Epilogue& e, const S& s) {
  const bool is_gated = S::kMayGate && e.is_gated();
  const int n = is_gated ? s.n / 2 : s.n;
  const auto col = [&](int group) {
    const int c = s.col0 + s.col(group);
    return is_gated ? Epilogue::gated_column(c) : c;
  };
  const auto exists = [&](int group) {
    return s.exists(group) && !(is_gated && s.col(group) % 16 >= 8);
  };
#pragma unroll 1
  for (int first = 0; first < S::kGroups; first += S::kBatch) {
    Vec<Out, 4> r[S::kBatch] = {};
    if (e.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < S::kBatch; ++i)
        if (exists(first + i))
          r[i] = e.load_residual<Out>(s.row0 + s.row(first + i), col(first + i), n);
    }
#pragma unroll
    for (int i = 0; i < S::kBatch; ++i) {
      const Vec<float, 4> sum = load_vec<float, 4>(s.at(first + i));
#pragma unroll
      for (int j = 0; j < 4; ++j)  // without a residual r is 0, and -0 + 0 would lose the sign
        r[i].v[j] =
            from_float<Out>(e.residual != nullptr ? sum.v[j] + to_float(r[i].v[j]) : sum.v[j]);
      if (exists(first + i)) e.store<Out>(s.row0 + s.row(first + i), col(first + i), n, r[i]);
    }
  }
}

// No barrier is needed between the two steps: a thread stores only groups that it has activated.
template <typename S>
__device__ __forceinline__ void store_slice(const Epilogue& e, const S& s) {
  if (!e.is_bare()) activate_slice(e, s);
  if (sizeof(scalar_t) == sizeof(float) || e.is_float)
    store_slice_as<float>(e, s);
  else
    store_slice_as<scalar_t>(e, s);
}
