// SwiGLU on packed halves, quantized to 8-bit codes: swiglu and quantize_rows fused.
//
//   y = round(silu(gate) * up),   x = [gate | up];   codes and scales of y as in quantize_rows.cu
//
//   x       (M, 2N) scalar_t   rows x_stride elements apart
//   codes   (M, N)  8 bits, contiguous
//   scales  (M, 1) or (M, ceil(N / 128))  float
//
// Numerics: y is rounded to scalar_t first, so the result has the same bits as the two separate
// ops.
// Parallelisation: see quantize_rows.cu; rows that do not fit into registers are computed twice.
// Mirror: engine/reference/swiglu_quantize.py
#include "common/activation.cuh"
#include "common/coded_row.cuh"

__device__ __forceinline__ scalar_t gated(scalar_t gate, scalar_t up) {
  return from_float<scalar_t>(silu(to_float(gate)) * to_float(up));
}

template <typename Codes, int kThreads, int kVectors>
__device__ __forceinline__ void swiglu_quantize(const scalar_t* x, int64_t x_stride,
                                                unsigned char* codes, float* scales, int n,
                                                int group) {
  pdl_trigger();
  pdl_wait();
  __shared__ float smem_peaks[kThreads / kWarpSize];
  x += static_cast<int64_t>(blockIdx.x) * x_stride;
  const CodedRow row = coded_row(codes, scales, blockIdx.x, n, group);
  if constexpr (kVectors == 0) {
    const auto value = [&](int i) { return gated(x[i], x[static_cast<int64_t>(n) + i]); };
    quantize_any<Codes, kThreads>(row, value, smem_peaks);
  } else {
    Packed<kVec> v[kVectors], up[kVectors];  // gate, later the product
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = (k * kThreads + static_cast<int>(threadIdx.x)) * kVec;
      v[k] = up[k] = Packed<kVec>{};
      if (i < n) v[k] = load_packed<kVec>(x + i), up[k] = load_packed<kVec>(x + n + i);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Vec<scalar_t, kVec> y = unpack<kVec>(v[k]);
      const Vec<scalar_t, kVec> factor = unpack<kVec>(up[k]);
#pragma unroll
      for (int j = 0; j < kVec; ++j) y.v[j] = gated(y.v[j], factor.v[j]);
      v[k] = pack<kVec>(y);
    }
    quantize_registers<Codes, kThreads>(row, v, smem_peaks);
  }
}

#define ENGINE_SWIGLU_QUANTIZE(name, Codes, threads, vectors)                               \
  extern "C" __global__ void __launch_bounds__(threads)                                     \
      name(const scalar_t* x, int64_t x_stride, unsigned char* codes, float* scales, int n, \
           int group) {                                                                     \
    swiglu_quantize<Codes, threads, vectors>(x, x_stride, codes, scales, n, group);         \
  }

ENGINE_QUANTIZE_ENTRIES(ENGINE_SWIGLU_QUANTIZE, swiglu_quantize, fp8, E4m3)
ENGINE_QUANTIZE_ENTRIES(ENGINE_SWIGLU_QUANTIZE, swiglu_quantize, int8, Int8)
