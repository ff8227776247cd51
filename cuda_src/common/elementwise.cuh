// Elementwise maps over flat arrays and over packed rows [gate | up].
//
// Public: sm_80 up.
#pragma once

#include "common/pdl.cuh"
#include "common/types.cuh"

// out[i] = f(x[i], ...) for n elements of contiguous arrays. Each of the first num_vectors threads
// processes one 16-byte vector, each later thread one of the remaining elements. num_vectors is 0
// if a pointer is unaligned; f takes and returns floats. A thread writes only elements that it has
// read, so out may alias an input.
template <typename F, typename... Inputs>
__device__ __forceinline__ void map_flat(int64_t num_vectors, int64_t n, F f, scalar_t* out,
                                         const Inputs*... inputs) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= num_vectors) {
    const int64_t rest = num_vectors * kVec + (i - num_vectors);
    if (rest < n) out[rest] = from_float<scalar_t>(f(to_float(inputs[rest])...));
    return;
  }
  const auto apply = [&](const auto&... vectors) {
    Vec<scalar_t, kVec> y;
#pragma unroll
    for (int j = 0; j < kVec; ++j) y.v[j] = from_float<scalar_t>(f(to_float(vectors.v[j])...));
    return y;
  };
  store_vec(out + i * kVec, apply(load_vec<scalar_t, kVec>(inputs + i * kVec)...));
}

// Threads per block of map_gated.
constexpr int kGatedThreads = 128;

// out[r, c] = f(gate[r, c]) * up[r, c] for c < num_features, rounded once. One thread per kWidth
// features, which all accesses must be aligned to: blockIdx.x indexes features, blockIdx.y rows.
// Rows are gate_stride, up_stride and out_stride elements apart. out may be gate or up.
template <int kWidth, typename F>
__device__ __forceinline__ void map_gated(const scalar_t* gate, const scalar_t* up, scalar_t* out,
                                          int64_t num_rows, int num_features, int64_t gate_stride,
                                          int64_t up_stride, int64_t out_stride, F f) {
  using V = Vec<scalar_t, kWidth>;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kGatedThreads + threadIdx.x) * kWidth;
  if (c >= num_features) return;
  for (int64_t r = blockIdx.y; r < num_rows; r += gridDim.y) {
    V y = load_vec<scalar_t, kWidth>(gate + r * gate_stride + c);
    const V factor = load_vec<scalar_t, kWidth>(up + r * up_stride + c);
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      y.v[j] = from_float<scalar_t>(f(to_float(y.v[j])) * to_float(factor.v[j]));
    store_vec(out + r * out_stride + c, y);
  }
}

// Defines the entry point `name` of a gated op with activation `f` (activation.cuh).
#define ENGINE_GATED(name, width, f)                                                            \
  extern "C" __global__ void __launch_bounds__(kGatedThreads)                                   \
      name(const scalar_t* gate, const scalar_t* up, scalar_t* out, int64_t num_rows,           \
           int num_features, int64_t gate_stride, int64_t up_stride, int64_t out_stride) {      \
    pdl_trigger();                                                                              \
    pdl_wait();                                                                                 \
    map_gated<width>(gate, up, out, num_rows, num_features, gate_stride, up_stride, out_stride, \
                     [](float x) { return f(x); });                                             \
  }

// Defines the entry point `name` that applies activation `f` to n elements.
#define ENGINE_UNARY(name, f)                                                  \
  extern "C" __global__ void __launch_bounds__(256)                            \
      name(const scalar_t* x, scalar_t* out, int64_t num_vectors, int64_t n) { \
    map_flat(num_vectors, n, [](float a) { return f(a); }, out, x);            \
  }
