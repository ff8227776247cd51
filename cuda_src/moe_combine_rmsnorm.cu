// Sum of each token's expert outputs, residual addition and RMSNorm, fused; y is written, or
// quantized to 8-bit codes.
//
//   x = sum over the experts, see moe_combine.cu;   h = x + residual;   y = rmsnorm(h), see
//   rmsnorm.cu;   codes and scales of y: see quantize_rows.cu
//
//   pairs         (T, k, N) scalar_t   contiguous, as the other arrays
//   residual      (T, N) scalar_t
//   weight        (N,) scalar_t
//   residual_out  (T, N) scalar_t      h; may be residual
//   y             (T, N) scalar_t      moe_combine_rmsnorm_<size>
//   codes         (T, N) 8 bits        moe_combine_rmsnorm_<codes>_<size>
//   scales        (T, 1) or (T, ceil(N / 128)) float   group is 0 or 128
//
// With `is_late` the next kernel is triggered after pdl_wait, otherwise at once.
//
// Numerics: x, h and y are rounded to scalar_t, and sums follow the order of moe_combine.cu and
// rmsnorm.cu, so the result has the same bits as the separate ops.
// Parallelisation: one token per block, in registers; one entry point per warp count of rmsnorm.cu.
// The loads of several experts are in flight before the first is used. Longer rows, and rows not
// aligned to 16 bytes, use the separate ops.
// Mirror: engine/reference/moe_combine_rmsnorm.py
#include "common/rmsnorm_row.cuh"
#include "common/coded_row.cuh"

// Adds the `top_k` rows of a token, n apart, in the thread's vectors, whose first columns are
// `columns`.
template <int kVectors>
__device__ __forceinline__ void sum_experts(const scalar_t* from, const int (&columns)[kVectors],
                                            int top_k, int n, Words (&x)[kVectors]) {
  constexpr int kBatch = kVectors <= 2 ? 8 : 2;  // experts loaded together
  float sum[kVectors][kVec] = {};
#pragma unroll 1
  for (int first = 0; first < top_k; first += kBatch) {
    Words own[kBatch][kVectors];
#pragma unroll
    for (int e = 0; e < kBatch; ++e)
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        own[e][k] = Words{};
        if (first + e < top_k && columns[k] < n)
          own[e][k] = load_packed<kVec>(from + static_cast<int64_t>(first + e) * n + columns[k]);
      }
#pragma unroll
    for (int e = 0; e < kBatch; ++e)
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const Vec<scalar_t, kVec> part = unpack<kVec>(own[e][k]);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[k][j] += to_float(part.v[j]);
      }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Vec<scalar_t, kVec> rounded;
#pragma unroll
    for (int j = 0; j < kVec; ++j) rounded.v[j] = from_float<scalar_t>(sum[k][j]);
    x[k] = pack<kVec>(rounded);
  }
}

// Calls use(k, i, y) as finish_register_row does.
template <int kWarps, int kVectors, typename Use>
__device__ __forceinline__ void combine_rmsnorm(const scalar_t* pairs, const scalar_t* residual,
                                                const scalar_t* weight, scalar_t* residual_out,
                                                int top_k, int n, float eps, float weight_offset,
                                                float* smem_sums, const Use& use) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * n;
  const Row row{nullptr, residual + at, weight,        nullptr, nullptr, residual_out + at,
                n,       eps,           weight_offset, 1.0f};
  Words h[kVectors], r[kVectors], w[kVectors];
  int columns[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    columns[k] = (k * kWarps * kWarpSize + static_cast<int>(threadIdx.x)) * kVec;
    r[k] = Words{};
    if (columns[k] < n) r[k] = load_packed<kVec>(row.residual + columns[k]);
  }
  sum_experts<kVectors>(pairs + at * top_k, columns, top_k, n, h);
  const auto load_weight = [&] { load_row_weight<kWarps, kVectors>(row, w); };
  finish_register_row<kWarps, kVectors>(row, h, r, w, load_weight, smem_sums, use);
}

#define ENGINE_COMBINE_RMSNORM(size, warps, vectors)                                              \
  extern "C" __global__ void __launch_bounds__((warps) * 32)                                      \
      moe_combine_rmsnorm_##size(const scalar_t* pairs, const scalar_t* residual,                 \
                                 const scalar_t* weight, scalar_t* residual_out, scalar_t* y,     \
                                 int top_k, int n, float eps, float weight_offset, int is_late) { \
    if (!is_late) pdl_trigger();                                                                  \
    pdl_wait();                                                                                   \
    if (is_late) pdl_trigger();                                                                   \
    __shared__ float smem_sums[warps];                                                            \
    scalar_t* own = y + static_cast<int64_t>(blockIdx.x) * n;                                     \
    combine_rmsnorm<warps, vectors>(                                                              \
        pairs, residual, weight, residual_out, top_k, n, eps, weight_offset, smem_sums,           \
        [&](int, int i, const Vec<scalar_t, kVec>& v) { store_packed(own + i, pack<kVec>(v)); }); \
  }
#define ENGINE_COMBINE_RMSNORM_CODES(size, warps, vectors, codes_name, Codes)            \
  extern "C" __global__ void __launch_bounds__((warps) * 32)                             \
      moe_combine_rmsnorm_##codes_name##_##size(                                         \
          const scalar_t* pairs, const scalar_t* residual, const scalar_t* weight,       \
          scalar_t* residual_out, unsigned char* codes, float* scales, int top_k, int n, \
          int group, float eps, float weight_offset) {                                   \
    pdl_trigger();                                                                       \
    pdl_wait();                                                                          \
    __shared__ float smem_sums[warps];                                                   \
    Words y[vectors];                                                                    \
    _Pragma("unroll") for (int k = 0; k < (vectors); ++k) y[k] = Words{};                \
    combine_rmsnorm<warps, vectors>(                                                     \
        pairs, residual, weight, residual_out, top_k, n, eps, weight_offset, smem_sums,  \
        [&](int k, int, const Vec<scalar_t, kVec>& v) { y[k] = pack<kVec>(v); });        \
    const CodedRow row = coded_row(codes, scales, blockIdx.x, n, group);                 \
    quantize_registers<Codes, (warps) * kWarpSize>(row, y, smem_sums);                   \
  }
#define ENGINE_COMBINE_RMSNORM_ENTRIES(size, warps, vectors)    \
  ENGINE_COMBINE_RMSNORM(size, warps, vectors)                  \
  ENGINE_COMBINE_RMSNORM_CODES(size, warps, vectors, fp8, E4m3) \
  ENGINE_COMBINE_RMSNORM_CODES(size, warps, vectors, int8, Int8)

// The sizes are rmsnorm.cu's: KiB of the longest row.
ENGINE_COMBINE_RMSNORM_ENTRIES(1, 1, 2)
ENGINE_COMBINE_RMSNORM_ENTRIES(2, 2, 2)
ENGINE_COMBINE_RMSNORM_ENTRIES(4, 4, 2)
ENGINE_COMBINE_RMSNORM_ENTRIES(8, 8, 2)
ENGINE_COMBINE_RMSNORM_ENTRIES(16, 8, 4)
ENGINE_COMBINE_RMSNORM_ENTRIES(32, 16, 4)
