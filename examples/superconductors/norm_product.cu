// out = rmsnorm(x) W^T, with W in shared memory; as 16-bit values, or times a factor per column in
// e4m3.
#include "rows.cuh"

constexpr int kThreads = 256;
constexpr int kStep = 64;  // results of a row per product

__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// Calls store(column, sums, first row) for every 64 results of every 16 rows.
template <typename Store>
__device__ __forceinline__ void norm_and_multiply(const scalar_t* x, const scalar_t* norm,
                                                  const scalar_t* weight, int64_t rows, int N,
                                                  float eps, Lane lane, Store store) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* const smem = aligned(dynamic);
  copy_matrix<kHidden>(smem, weight, N, N, [](int row) { return result_of(row); });
  fence_async_proxy();
  __syncthreads();  // SAFETY: after it, wgmma reads what all threads have written.
  const unsigned w = smem_address(smem);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / 128) * kGroupRows;
  int64_t first = (blockIdx.x * (kThreads / 128) + threadIdx.x / 128) * kGroupRows;
  for (; first < rows; first += stride) {
    const int64_t of_warp = first + threadIdx.x % 128 / 32 * 16;
    Operand<kBlocks> normed;
    {
      float sums[kHidden / 2];
      load_sums(sums, x, of_warp, rows, lane);
      prefetch_rows(x, of_warp + stride, rows, lane);
      normalise(normed, sums, norm, eps, lane);
    }
    for (int n = 0; n < N; n += kStep) {
      float sums[kStep / 2];
      wgmma_fence();
      multiply<kStep>(sums, normed, w, N, n, 0, false);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(sums);
      store(n, sums, of_warp);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    norm_product(const scalar_t* x, const scalar_t* norm, const scalar_t* weight, scalar_t* out,
                 int64_t rows, int N, float eps) {
  const Lane lane;
  norm_and_multiply(x, norm, weight, rows, N, eps, lane,
                    [&](int n, const float (&sums)[kStep / 2], int64_t first) {
                      store_sums(out + n, sums, first, rows, N, lane);
                    });
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    norm_product_codes(const scalar_t* x, const scalar_t* norm, const scalar_t* weight,
                       const float* factors, uint8_t* out, int64_t rows, int N, float eps) {
  const Lane lane;
  norm_and_multiply(
      x, norm, weight, rows, N, eps, lane,
      [&](int n, const float (&sums)[kStep / 2], int64_t first) {
#pragma unroll
        for (int b = 0; b < kStep / 32; ++b) {
          const int column = n + 32 * b + 8 * lane.t;
          const auto f = load_vec<float, 4>(factors + column),
                     g = load_vec<float, 4>(factors + column + 4);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int64_t row = first + lane.g + 8 * half;
            if (row >= rows) continue;
            const float* const s = sums + 16 * b + 2 * half;
            const Vec<uint32_t, 2> codes = {e4m3_pair(s[0] * f.v[0], s[1] * f.v[1]) |
                                                e4m3_pair(s[4] * f.v[2], s[5] * f.v[3]) << 16,
                                            e4m3_pair(s[8] * g.v[0], s[9] * g.v[1]) |
                                                e4m3_pair(s[12] * g.v[2], s[13] * g.v[3]) << 16};
            store_vec(out + row * N + column, reinterpret_cast<const Vec<uint8_t, 8>&>(codes));
          }
        }
      });
}
