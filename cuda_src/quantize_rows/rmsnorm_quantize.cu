// RMSNorm with the preceding residual add, quantized to 8-bit codes: rmsnorm and quantize_rows
// fused.
//
//   y = rmsnorm(x_scale * x + residual), see rmsnorm.cu
//   codes and scales of y: see quantize_rows.cu
//
// Arguments: RmsnormQuantizeParams, below.
//
// Numerics: y is rounded to scalar_t first, and sums follow rmsnorm.cu's order, so the result has
// the same bits as the two separate ops.
// Parallelisation: one row per block, in registers; one entry point per warp count of rmsnorm.cu.
// Longer rows, and rows not aligned to 16 bytes, use the two separate ops.
// Mirror: engine/reference/rmsnorm_quantize.py
#include "common/rmsnorm_row.cuh"
#include "common/coded_row.cuh"

struct RmsnormQuantizeParams {
  const scalar_t* x;         // (M, N), rows x_stride elements apart
  const scalar_t* residual;  // (M, N) contiguous, or null
  const scalar_t* weight;    // (N,)
  scalar_t* residual_out;    // (M, N) h, contiguous; may be residual; null without a residual
  scalar_t* normed_out;      // (M, N) y, contiguous, or null; may be x
  unsigned char* codes;      // (M, N) contiguous
  float* scales;             // (M, 1) or (M, ceil(N / 128))
  int64_t x_stride;          // elements
  int n, group;              // group is 0 or 128
  float eps, weight_offset, x_scale;
};

template <typename Codes, int kWarps, int kVectors>
__device__ __forceinline__ void rmsnorm_quantize(const RmsnormQuantizeParams& p) {
  pdl_trigger();
  pdl_wait();
  __shared__ float smem_sums[kWarps];
  const int64_t i = blockIdx.x;
  const bool has_residual = p.residual != nullptr;
  const Row row{p.x + i * p.x_stride,
                has_residual ? p.residual + i * p.n : nullptr,
                p.weight,
                nullptr,
                nullptr,
                has_residual ? p.residual_out + i * p.n : nullptr,
                p.n,
                p.eps,
                p.weight_offset,
                p.x_scale};
  Words y[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) y[k] = Words{};
  const auto keep = [&](int k, int column, const Vec<scalar_t, kVec>& own) {
    y[k] = pack<kVec>(own);
    if (p.normed_out != nullptr) store_vec(p.normed_out + i * p.n + column, own);
  };
  rmsnorm_register_row<kWarps, kVectors>(row, smem_sums, keep);
  quantize_registers<Codes, kWarps * kWarpSize>(coded_row(p.codes, p.scales, i, p.n, p.group), y,
                                                smem_sums);
}

// The sizes are rmsnorm.cu's: KiB of the longest row.
#define ENGINE_RMSNORM_QUANTIZE(name, Codes, warps, vectors)  \
  extern "C" __global__ void __launch_bounds__((warps) * 32)  \
      name(const __grid_constant__ RmsnormQuantizeParams p) { \
    rmsnorm_quantize<Codes, warps, vectors>(p);               \
  }
#define ENGINE_RMSNORM_QUANTIZE_ENTRIES(codes, Codes)                 \
  ENGINE_RMSNORM_QUANTIZE(rmsnorm_quantize_##codes##_1, Codes, 1, 2)  \
  ENGINE_RMSNORM_QUANTIZE(rmsnorm_quantize_##codes##_2, Codes, 2, 2)  \
  ENGINE_RMSNORM_QUANTIZE(rmsnorm_quantize_##codes##_4, Codes, 4, 2)  \
  ENGINE_RMSNORM_QUANTIZE(rmsnorm_quantize_##codes##_8, Codes, 8, 2)  \
  ENGINE_RMSNORM_QUANTIZE(rmsnorm_quantize_##codes##_16, Codes, 8, 4) \
  ENGINE_RMSNORM_QUANTIZE(rmsnorm_quantize_##codes##_32, Codes, 16, 4)

ENGINE_RMSNORM_QUANTIZE_ENTRIES(fp8, E4m3)
ENGINE_RMSNORM_QUANTIZE_ENTRIES(int8, Int8)
