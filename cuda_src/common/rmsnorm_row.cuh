// RMSNorm (LayerNorm if compiled with CENTRED=1) of one row in registers, including the preceding
// residual add. Formula: rmsnorm.cu.
#pragma once

#include "common/packed.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

#ifdef CENTRED
constexpr bool kIsCentred = CENTRED;
#else
constexpr bool kIsCentred = false;
#endif

// Offsets, in elements, of the rows of an array (A, B, N) with strided axes A and B.
struct Rows {
  int64_t stride_a, stride_b;
  int num_b;

  __device__ __forceinline__ int64_t offset(int64_t row) const {
    if (num_b == 1) return row * stride_a;  // avoids the slow division
    return (row / num_b) * stride_a + (row % num_b) * stride_b;
  }
};

struct Row {
  const scalar_t *x, *residual, *weight, *bias;  // residual and bias may be null
  scalar_t *out, *residual_out;
  int n;
  float eps, weight_offset, x_scale;
};

// x_scale * x + residual, rounded after each operation.
__device__ __forceinline__ scalar_t scaled_sum(scalar_t x, float x_scale, scalar_t residual) {
  return from_float<scalar_t>(__fadd_rn(__fmul_rn(to_float(x), x_scale), to_float(residual)));
}

__device__ __forceinline__ float squared(float x) { return x * x; }

// Term of the first sum over a row: the square or, for LayerNorm's mean, the value itself.
__device__ __forceinline__ float first_term(float x) { return kIsCentred ? x : squared(x); }

__device__ __forceinline__ scalar_t normalised(scalar_t x, float mean, float scale, float factor,
                                               scalar_t bias) {
  if (!kIsCentred) return from_float<scalar_t>(to_float(x) * scale * factor);
  return from_float<scalar_t>((to_float(x) - mean) * scale * factor + to_float(bias));
}

using Words = Packed<kVec>;

// Hides the value of x from the compiler, which would otherwise keep the unpacked floats alive from
// the first use to the second, in twice as many registers.
__device__ __forceinline__ void hide_value(Words& x) {
#pragma unroll
  for (uint32_t& word : x.v.v) asm volatile("" : "+r"(word));
}

// Loads the thread's vectors of the row's weight.
template <int kWarpsPerRow, int kVectors>
__device__ __forceinline__ void load_row_weight(const Row& row, Words (&w)[kVectors]) {
  constexpr int kStep = kWarpsPerRow * kWarpSize * kVec;
  const int begin = (threadIdx.x % (kWarpsPerRow * kWarpSize)) * kVec;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int i = begin + k * kStep;
    w[k] = Words{};
    if (i < row.n) w[k] = load_packed<kVec>(row.weight + i);
  }
}

// Finishes a row, given the thread's vectors of x, residual and weight in h, r and w. `load_late`
// is called once r is no longer needed, and may load w. `use(k, i, y)` receives the thread's vector
// k: the results from column i on.
template <int kWarpsPerRow, int kVectors, typename LoadLate, typename Use>
__device__ __forceinline__ void finish_register_row(const Row& row, Words (&h)[kVectors],
                                                    Words (&r)[kVectors], Words (&w)[kVectors],
                                                    const LoadLate& load_late, float* smem_sums,
                                                    const Use& use) {
  constexpr int kStep = kWarpsPerRow * kWarpSize * kVec;
  const int begin = (threadIdx.x % (kWarpsPerRow * kWarpSize)) * kVec;
  const bool has_residual = row.residual != nullptr;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int i = begin + k * kStep;
    Vec<scalar_t, kVec> own = unpack<kVec>(h[k]);
    if (has_residual) {
      const Vec<scalar_t, kVec> other = unpack<kVec>(r[k]);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        own.v[j] = scaled_sum(own.v[j], row.x_scale, other.v[j]);
      }
      h[k] = pack<kVec>(own);
      if (i < row.n) store_vec(row.residual_out + i, own);
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += first_term(to_float(own.v[j]));
  }
  load_late();
  sum = block_sum<kWarpsPerRow>(sum, smem_sums);
  const float mean = kIsCentred ? sum / row.n : 0.0f;
  if (kIsCentred) {
    sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (begin + k * kStep >= row.n) break;
      hide_value(h[k]);
      const Vec<scalar_t, kVec> own = unpack<kVec>(h[k]);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum += squared(to_float(own.v[j]) - mean);
    }
    sum = block_sum<kWarpsPerRow>(sum, smem_sums);
  }
  const float scale = 1.0f / sqrtf(sum / row.n + row.eps);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int i = begin + k * kStep;
    hide_value(h[k]);
    hide_value(w[k]);
    Vec<scalar_t, kVec> own = unpack<kVec>(h[k]);
    const Vec<scalar_t, kVec> weight = unpack<kVec>(w[k]);
    Vec<scalar_t, kVec> bias = {};
    if (kIsCentred && row.bias != nullptr && i < row.n) {
      bias = load_vec<scalar_t, kVec>(row.bias + i);  // loaded late: registers are scarce
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float factor = to_float(weight.v[j]) + row.weight_offset;
      own.v[j] = normalised(own.v[j], mean, scale, factor, bias.v[j]);
    }
    if (i < row.n) use(k, i, own);
  }
}

// Normalises a row in registers, kVectors vectors per thread. `use(k, i, y)` receives the thread's
// vector k: the results from column i on.
template <int kWarpsPerRow, int kVectors, typename Use>
__device__ __forceinline__ void rmsnorm_register_row(const Row& row, float* smem_sums,
                                                     const Use& use) {
  constexpr int kStep = kWarpsPerRow * kWarpSize * kVec;
  const int begin = (threadIdx.x % (kWarpsPerRow * kWarpSize)) * kVec;
  const bool has_residual = row.residual != nullptr;
  Words h[kVectors], r[kVectors], w[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int i = begin + k * kStep;
    h[k] = r[k] = Words{};
    if (i < row.n) h[k] = load_packed<kVec>(row.x + i);
    if (i < row.n && has_residual) r[k] = load_packed<kVec>(row.residual + i);
  }
  constexpr bool kLoadsWeightFirst = kVectors <= 2;  // otherwise w reuses r's registers
  const auto load_weight = [&] { load_row_weight<kWarpsPerRow, kVectors>(row, w); };
  if (kLoadsWeightFirst) load_weight();
  const auto load_late = [&] {
    if (!kLoadsWeightFirst) load_weight();
  };
  finish_register_row<kWarpsPerRow, kVectors>(row, h, r, w, load_late, smem_sums, use);
}
