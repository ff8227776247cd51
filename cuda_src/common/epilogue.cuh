// The epilogue of a product, in float, rounded once:
//
//   out = activation(sum + bias) + residual
//
// With kSiluAndMul the rows of the weight, and the bias, alternate between gate and up, eight of
// each: columns 16 i + j and 16 i + 8 + j of the product (j < 8) yield column 8 i + j of out, which
// has n / 2 columns: silu(gate) * up + residual.
#pragma once

#include "common/activation.cuh"
#include "common/types.cuh"

enum Activation { kIdentity = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3, kRelu = 4, kSiluAndMul = 5 };

__device__ __forceinline__ float activate(int activation, float x) {
  switch (activation) {
    case kSilu:
      return silu(x);
    case kGelu:
      return gelu_erf(x);
    case kGeluTanh:
      return gelu_tanh(x);
    case kRelu:
      return relu(x);
    default:
      return x;
  }
}

struct Epilogue {
  const scalar_t* bias;  // (n,), or null
  const void* residual;  // shape and dtype of out, or null; may be out
  void* out;             // (m, n), or (m, n / 2) if gated
  int64_t residual_stride, out_stride;
  int activation;
  bool is_float;      // out and residual are float, else scalar_t
  bool is_vector;     // n, strides and addresses allow accesses of four elements
  int num_gates = 0;  // gated: rows of gate, if all of them precede those of up; else 0

  __device__ __forceinline__ bool is_gated() const { return activation == kSiluAndMul; }
  __device__ __forceinline__ bool is_bare() const {
    return bias == nullptr && activation == kIdentity;
  }
  // The number of columns of out, and the column of out that the gate in column n of the product
  // belongs to.
  __device__ __forceinline__ int out_columns(int n) const { return is_gated() ? n / 2 : n; }
  __device__ __forceinline__ static int gated_column(int n) { return n / 16 * 8 + n % 8; }

  __device__ __forceinline__ float biased(int n, float sum) const {
    return activate(activation, bias != nullptr ? sum + to_float(bias[n]) : sum);
  }

  // The index of the bias of the product's column n.
  __device__ __forceinline__ int bias_index(int n) const {
    return num_gates > 0 ? gated_column(n) + n / 8 % 2 * num_gates : n;
  }

  // `gate` is the sum in the product's column n, `up` that in column n + 8.
  __device__ __forceinline__ float gated(int n, float gate, float up) const {
    if (bias != nullptr) {
      gate += to_float(bias[bias_index(n)]);
      up += to_float(bias[bias_index(n + 8)]);
    }
    return silu(gate) * up;
  }

  // Columns n .. n + 3 of a row; n is a multiple of 4 and below num_cols.
  template <typename Out>
  __device__ __forceinline__ Vec<Out, 4> load_residual(int64_t row, int n, int num_cols) const {
    Vec<Out, 4> r = {};
    const Out* p = static_cast<const Out*>(residual) + row * residual_stride + n;
    if (is_vector) return load_vec<Out, 4>(p);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (n + j < num_cols) r.v[j] = p[j];
    return r;
  }

  template <typename Out>
  __device__ __forceinline__ void store(int64_t row, int n, int num_cols, Vec<Out, 4> y) const {
    Out* p = static_cast<Out*>(out) + row * out_stride + n;
    if (is_vector) return store_vec(p, y);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (n + j < num_cols) p[j] = y.v[j];
  }

  // `sum` is complete but for the residual.
  template <typename Out>
  __device__ __forceinline__ void store_one_as(int64_t row, int n, float sum) const {
    if (residual != nullptr)
      sum += to_float(static_cast<const Out*>(residual)[row * residual_stride + n]);
    static_cast<Out*>(out)[row * out_stride + n] = from_float<Out>(sum);
  }

  __device__ __forceinline__ void store_activated(int64_t row, int n, float y) const {
    if (is_float)
      store_one_as<float>(row, n, y);
    else
      store_one_as<scalar_t>(row, n, y);
  }

  // Stores column n of the product; sum_at(n) returns the sum of any column. Columns of up store
  // nothing.
  template <typename SumAt>
  __device__ __forceinline__ void store_one(int64_t row, int n, const SumAt& sum_at) const {
    if (!is_gated())
      store_activated(row, n, biased(n, sum_at(n)));
    else if (n % 16 < 8)
      store_activated(row, gated_column(n), gated(n, sum_at(n), sum_at(n + 8)));
  }
};
