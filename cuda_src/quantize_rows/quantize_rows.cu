// Quantizes rows to 8-bit codes (e4m3, int8), with one scale per row or per 128 columns of a row.
//
//   code = round(x * min(largest / peak, FLT_MAX)),  scale = peak / largest,  peak = max |x|
//
//   x       (M, N)  scalar_t   rows x_stride elements apart
//   codes   (M, N)  8 bits, contiguous
//   scales  (M, 1) or (M, ceil(N / 128))  float
//
// With `is_late` the next kernel is triggered after pdl_wait, otherwise at once.
//
// Numerics: single float operations, rounded to nearest even, match the mirror bit for bit.
// Parallelisation: one row per block, kept in registers between the maximum and the codes; longer
// rows, and rows not aligned to 16 bytes, are read twice.
// Mirror: engine/reference/quantize_rows.py
#include "common/coded_row.cuh"

template <typename Codes, int kThreads, int kVectors>
__device__ __forceinline__ void quantize_rows(const scalar_t* x, int64_t x_stride,
                                              unsigned char* codes, float* scales, int n, int group,
                                              int is_late) {
  if (!is_late) pdl_trigger();
  pdl_wait();
  if (is_late) pdl_trigger();
  __shared__ float smem_peaks[kThreads / kWarpSize];
  x += static_cast<int64_t>(blockIdx.x) * x_stride;
  const CodedRow row = coded_row(codes, scales, blockIdx.x, n, group);
  if constexpr (kVectors == 0) {
    quantize_any<Codes, kThreads>(row, [&](int i) { return x[i]; }, smem_peaks);
  } else {
    Packed<kVec> v[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = (k * kThreads + static_cast<int>(threadIdx.x)) * kVec;
      v[k] = Packed<kVec>{};
      if (i < n) v[k] = load_packed<kVec>(x + i);
    }
    quantize_registers<Codes, kThreads>(row, v, smem_peaks);
  }
}

#define ENGINE_QUANTIZE_ROWS(name, Codes, threads, vectors)                                 \
  extern "C" __global__ void __launch_bounds__(threads)                                     \
      name(const scalar_t* x, int64_t x_stride, unsigned char* codes, float* scales, int n, \
           int group, int is_late) {                                                        \
    quantize_rows<Codes, threads, vectors>(x, x_stride, codes, scales, n, group, is_late);  \
  }

ENGINE_QUANTIZE_ENTRIES(ENGINE_QUANTIZE_ROWS, quantize_rows, fp8, E4m3)
ENGINE_QUANTIZE_ENTRIES(ENGINE_QUANTIZE_ROWS, quantize_rows, int8, Int8)
