// GEMM epilogue, computed in float and rounded once:
//
//   out = activation(sum + bias) + residual
//
// With kSiluAndMul the weight's rows (and the bias) alternate between eight of gate and eight of
// up. Columns 16 i + j (gate) and 16 i + 8 + j (up) of the product, j < 8, yield column 8 i + j of
// out, silu(gate) * up + residual; out has n / 2 columns.
#pragma once

#include "common/activation.cuh"
#include "common/types.cuh"

#ifdef SUMS_IN_PARTS
// The module serves `deterministic`: k is summed in parts whose length depends on k alone, each in
// ascending steps of 16, and the parts are added in order.
constexpr bool kSumsInParts = true;
#else
constexpr bool kSumsInParts = false;
#endif

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

// silu(gate) * up, more precise than 16 bits.
__device__ __forceinline__ float gated_to_round(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

struct Epilogue {
  const scalar_t* bias;  // (n,), or null
  const void* residual;  // same shape and dtype as out, or null; may alias out
  void* out;             // (m, n), or (m, n / 2) if gated
  int64_t residual_stride, out_stride;
  int activation;
  bool is_float;      // out and residual are float; otherwise scalar_t
  bool is_vector;     // n, strides and addresses allow four-element accesses
  int num_gates = 0;  // length of gate's bias if up's follows it; 0: they alternate

  __device__ __forceinline__ bool is_gated() const { return activation == kSiluAndMul; }
  __device__ __forceinline__ bool is_bare() const {
    return bias == nullptr && activation == kIdentity;
  }
  // out_columns: number of columns of out. gated_column: the output column computed from the gate
  // in column n of the product.
  __device__ __forceinline__ int out_columns(int n) const { return is_gated() ? n / 2 : n; }
  __device__ __forceinline__ static int gated_column(int n) { return n / 16 * 8 + n % 8; }

  __device__ __forceinline__ float biased(int n, float sum) const {
    return activate(activation, bias != nullptr ? sum + to_float(bias[n]) : sum);
  }

  // Index in `bias` of the product's column n.
  __device__ __forceinline__ int bias_index(int n) const {
    return num_gates > 0 ? gated_column(n) + n / 8 % 2 * num_gates : n;
  }

  // `gate` is the sum in column n of the product, `up` the sum in column n + 8.
  __device__ __forceinline__ float gated(int n, float gate, float up) const {
    if (bias != nullptr) {
      gate += to_float(bias[bias_index(n)]);
      up += to_float(bias[bias_index(n + 8)]);
    }
    return silu(gate) * up;
  }

  // silu(gate) * up, with the bits that Hopper's tiles return in parts.
  __device__ __forceinline__ float gated_result(float gate, float up) const {
    if (kSumsInParts && !is_float && residual == nullptr) return gated_to_round(gate, up);
    return silu(gate) * up;
  }

  // y + r, not yet rounded, for an element r of the residual, or 0 if there is none. Adding 0 would
  // turn -0 into 0; in parts, 0 is added where tiles add it.
  __device__ __forceinline__ float with_residual(float y, float r) const {
    const bool adds_zero = kSumsInParts && !is_gated() && (is_float || activation != kIdentity);
    if (kSumsInParts && !is_float) y = addend<scalar_t>(y);
    if (kSumsInParts) return residual != nullptr || adds_zero ? __fadd_rn(y, r) : y;  // no FMA
    if (residual != nullptr) y += r;
    return y;
  }

  // Returns the addend of a residual: in parts the product is rounded before a residual is added,
  // so that a norm that adds it later returns the same bits.
  template <typename Out>
  __device__ __forceinline__ float addend(float y) const {
    return kSumsInParts && residual != nullptr ? to_float(from_float<Out>(y)) : y;
  }

  // Loads columns n .. n + 3 of a row; n is a multiple of 4 and less than num_cols.
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

  // `sum` lacks only the residual.
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

  // Stores column n of the product; sum_at(n) returns the sum of any column. If gated, the up
  // columns store nothing.
  template <typename SumAt>
  __device__ __forceinline__ void store_one(int64_t row, int n, const SumAt& sum_at) const {
    if (!is_gated())
      store_activated(row, n, biased(n, sum_at(n)));
    else if (n % 16 < 8)
      store_activated(row, gated_column(n), gated(n, sum_at(n), sum_at(n + 8)));
  }
};
