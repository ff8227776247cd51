// The epilogue of gemm_wna16_sm90.cu: bias, activation and residual in float, rounded once.
#pragma once

#include "common/epilogue.cuh"
#include "gemm_wna16/gemm_wna16_scheduler_sm90.cuh"

// Eight neighbouring columns of a row of out.
struct alignas(16) Eight {
  float v[8];
};

struct RowEpilogue {
  Epilogue e;
  int columns;    // columns of out
  int num_gates;  // gated: number of gate rows, which precede the up rows; else 0

  template <typename Out>
  __device__ __forceinline__ void add_residual(int64_t row, int column, Eight& y) const {
    const Out* from = static_cast<const Out*>(e.residual) + row * e.residual_stride + column;
    if (e.is_vector && column + 8 <= columns) {
#pragma unroll
      for (int part = 0; part < 8; part += 4) {
        const Vec<Out, 4> r = load_vec<Out, 4>(from + part);
#pragma unroll
        for (int j = 0; j < 4; ++j) y.v[part + j] += to_float(r.v[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (column + j < columns) y.v[j] += to_float(from[j]);
    }
  }

  template <typename Out>
  __device__ __forceinline__ void store(int64_t row, int column, const Eight& y) const {
    Out* to = static_cast<Out*>(e.out) + row * e.out_stride + column;
    if (e.is_vector && column + 8 <= columns) {
      constexpr int kPart = 16 / sizeof(Out);
#pragma unroll
      for (int part = 0; part < 8; part += kPart) {
        Vec<Out, kPart> r;
#pragma unroll
        for (int j = 0; j < kPart; ++j) r.v[j] = from_float<Out>(y.v[part + j]);
        store_vec(to + part, r);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (column + j < columns) to[j] = from_float<Out>(y.v[j]);
    }
  }

  // Adds the bias of weight rows from `from` on to columns from `column` on.
  __device__ __forceinline__ void add_bias(int column, int from, Eight& y) const {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (column + j < columns) y.v[j] += to_float(e.bias[from + j]);
  }

  __device__ __forceinline__ void activate_eight(Eight& y) const {
    if (e.activation == kSilu)
      for (int j = 0; j < 8; ++j) y.v[j] = silu(y.v[j]);
    else if (e.activation == kGelu)
      for (int j = 0; j < 8; ++j) y.v[j] = gelu_erf(y.v[j]);
    else if (e.activation == kGeluTanh)
      for (int j = 0; j < 8; ++j) y.v[j] = gelu_tanh(y.v[j]);
    else if (e.activation == kRelu)
      for (int j = 0; j < 8; ++j) y.v[j] = relu(y.v[j]);
  }

  // Whether results are plain sums plus a bias, stored as scalar_t.
  __device__ __forceinline__ bool has_halves() const {
    return (num_gates > 0 || e.activation == kIdentity) && !e.is_float && e.residual == nullptr;
  }

  // Adds the bias to a thread's sums of the m-tile that begins at row `row`.
  template <int kCount>
  __device__ __forceinline__ void add_bias_of_rows(int row, float (&acc)[kCount]) const {
    if (e.bias == nullptr) return;
    const float low = row < columns ? to_float(e.bias[row]) : 0.0f;
    const float high = row + 8 < columns ? to_float(e.bias[row + 8]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[i] += i / 2 % 2 == 0 ? low : high;
  }

  __device__ __forceinline__ void store_eight(int64_t row, int column,
                                              const Vec<scalar_t, 8>& y) const {
    scalar_t* to = static_cast<scalar_t*>(e.out) + row * e.out_stride + column;
    if (e.is_vector && column + 8 <= columns) {
      store_vec(to, y);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (column + j < columns) to[j] = y.v[j];
    }
  }

  // Finishes eight columns of row `row`, from `column` on; `y` holds their sums.
  __device__ __forceinline__ void finish(int64_t row, int column, Eight y) const {
    if (e.bias != nullptr) add_bias(column, column, y);
    if (e.activation != kIdentity) activate_eight(y);
    if (e.is_float) {
      if (e.residual != nullptr) add_residual<float>(row, column, y);
      store<float>(row, column, y);
    } else {
      if (e.residual != nullptr) add_residual<scalar_t>(row, column, y);
      store<scalar_t>(row, column, y);
    }
  }

  // Finishes eight columns of a gated product; `gate` and `up` hold their sums.
  __device__ __forceinline__ void finish_gated(int64_t row, int column, Eight gate,
                                               Eight up) const {
    if (e.bias != nullptr) {
      add_bias(column, column, gate);
      add_bias(column, num_gates + column, up);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) gate.v[j] = silu(gate.v[j]) * up.v[j];
    store<scalar_t>(row, column, gate);
  }
};

// Finishes `count` staged tokens, from `token` on, of the slice that begins at m-tile `mma` of each
// warpgroup.
__device__ __forceinline__ void finish_staged(const RowEpilogue& e, const float* staging, int token,
                                              int count, int block, int mma) {
  constexpr int kShift = kSliceRows == 64 ? 3 : kSliceRows == 128 ? 4 : 5;
  static_assert(8 << kShift == kSliceRows, "eights of a row");
  if (e.num_gates > 0) {  // slices of gated products have all rows
    constexpr int kWidth = kSliceRows / 2;
    for (int i = threadIdx.x; i < count << (kShift - 1); i += kConsumerThreads) {
      const int row = i >> (kShift - 1), within = (i & ((1 << (kShift - 1)) - 1)) * 8;
      const int column = block * kWidth + within;
      if (column >= e.columns) continue;
      const float* gate = staging + row * kStagingRow + within;
      e.finish_gated(token + row, column, *reinterpret_cast<const Eight*>(gate),
                     *reinterpret_cast<const Eight*>(gate + kWidth));
    }
    return;
  }
  const int first_column = block * kRows + mma * kMmaM;
  for (int i = threadIdx.x; i < count << kShift; i += kConsumerThreads) {
    const int row = i >> kShift, within = (i & ((1 << kShift) - 1)) * 8;
    // The first warpgroup's m-tiles of other slices may precede those of the next warpgroup.
    const int skipped = within / (kSliceMmaTiles * kMmaM) * (kMmaTiles - kSliceMmaTiles) * kMmaM;
    const int column = first_column + within + skipped;
    if (column >= e.columns) continue;
    e.finish(token + row, column,
             *reinterpret_cast<const Eight*>(staging + row * kStagingRow + within));
  }
}
