// All of a layer that follows attention, with its weights in shared memory:
//   finish_layer   s = x + mixed O^T
//   first_layer    s = table[elements] + features F^T, of a layer without attention
//   out = s + swiglu(rmsnorm(s) G^T) D^T
#include "rows.cuh"

constexpr int kInner = INNER;
constexpr int kThreads = 384;
constexpr int kRow = kSwizzleRowBytes;
constexpr int kDownBytes = kInner / kChunk * kHidden * kRow;
constexpr int kGateBytes = kHidden / kChunk * 2 * kInner * kRow;

// silu with the fast exponential and division: their error is below the rounding to 16 bits that
// follows.
__device__ __forceinline__ float fast_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Copies D, then G: 32 rows of the gate and the 32 of `up` that they multiply in turn.
__device__ __forceinline__ void copy_feed_forward(unsigned char* smem, const scalar_t* gate_up,
                                                  const scalar_t* down) {
  copy_matrix<kInner>(smem, down, kHidden, kHidden, [](int row) { return result_of(row); });
  copy_matrix<kHidden>(smem + kDownBytes, gate_up, 2 * kInner, 2 * kInner, [](int row) {
    const int is_up = row >= kInner, r = result_of(row - is_up * kInner);
    return r / 32 * 64 + 32 * is_up + r % 32;
  });
}

// sums += swiglu(rmsnorm(sums) G^T) D^T.
__device__ __forceinline__ void feed_forward(float (&sums)[kHidden / 2], const scalar_t* norm,
                                             unsigned down, float eps, Lane lane) {
  const unsigned gate_up = down + kDownBytes;
  Operand<kBlocks> operand;
  normalise(operand, sums, norm, eps, lane);
#pragma unroll 1
  for (int f = 0; f < kInner / 32; ++f) {
    float gate_and_up[32];
    wgmma_fence();
    multiply<64>(gate_and_up, operand, gate_up, 2 * kInner, 64 * f, 0, false);
    wgmma_commit();
    wgmma_wait<0>();  // also for the product with D of the preceding columns
    wgmma_pin(gate_and_up);
    Operand<1> inner;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const gate = gate_and_up + 4 * i + 2 * half;
        const float* const up = gate + 16;
        inner.a[i / 2][i % 2 * 2 + half] =
            pack2<scalar_t>(fast_silu(gate[0]) * up[0], fast_silu(gate[1]) * up[1]);
      }
    wgmma_fence();
    multiply<kHidden>(sums, inner, down, kHidden, 0, f, true);
    wgmma_commit();
  }
  wgmma_wait<0>();
  wgmma_pin(sums);
}

// A warpgroup's tiles of 64 rows: calls body(first row of the warp, that of its next tile).
template <typename Body>
__device__ __forceinline__ void for_rows(int64_t rows, Body body) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / 128) * kGroupRows;
  const int64_t begin = (blockIdx.x * (kThreads / 128) + threadIdx.x / 128) * kGroupRows;
  const int of_warp = threadIdx.x % 128 / 32 * 16;
  for (int64_t first = begin; first < rows; first += stride)
    body(first + of_warp, first + of_warp + stride);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    finish_layer(const scalar_t* x, const scalar_t* norm, const scalar_t* gate_up,
                 const scalar_t* down, const scalar_t* mixed, const scalar_t* mixed_weight,
                 scalar_t* out, int64_t rows, float eps) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* const smem = aligned(dynamic);
  copy_feed_forward(smem, gate_up, down);
  copy_matrix<kHidden>(smem + kDownBytes + kGateBytes, mixed_weight, kHidden, kHidden,
                       [](int row) { return result_of(row); });
  fence_async_proxy();
  __syncthreads();  // SAFETY: after it, wgmma reads what all threads have written.
  const unsigned d = smem_address(smem), o = d + kDownBytes + kGateBytes;
  const Lane lane;
  for_rows(rows, [&](int64_t first, int64_t next) {
    float sums[kHidden / 2];
    load_sums(sums, x, first, rows, lane);
    {
      Operand<kBlocks> operand;
      load_operand(operand, mixed, first, rows, lane);
      prefetch_rows(x, next, rows, lane);
      prefetch_rows(mixed, next, rows, lane);
      wgmma_fence();
      multiply<kHidden>(sums, operand, o, kHidden, 0, 0, true);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(sums);
    }
    feed_forward(sums, norm, d, eps, lane);
    store_sums(out, sums, first, rows, kHidden, lane);
  });
}

#ifdef FEATURES
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    first_layer(const int* elements, const float* features, const scalar_t* table,
                const scalar_t* feature_weight, const scalar_t* norm, const scalar_t* gate_up,
                const scalar_t* down, scalar_t* out, int64_t rows, float eps) {
  constexpr int kFeatureBlocks = (FEATURES + 31) / 32;
  extern __shared__ unsigned char dynamic[];
  unsigned char* const smem = aligned(dynamic);
  unsigned char* const of_features = smem + kDownBytes + kGateBytes;
  for (int i = threadIdx.x; i < kHidden * kRow / 16; i += kThreads)
    reinterpret_cast<uint4*>(of_features)[i] = {};  // columns past the last feature
  copy_feed_forward(smem, gate_up, down);
  __syncthreads();  // SAFETY: the features' weight overwrites zeros of other threads.
  copy_matrix<FEATURES>(of_features, feature_weight, kHidden, kHidden,
                        [](int row) { return result_of(row); });
  fence_async_proxy();
  __syncthreads();  // SAFETY: after it, wgmma reads what all threads have written.
  const unsigned d = smem_address(smem), w = smem_address(of_features);
  const Lane lane;
  for_rows(rows, [&](int64_t first, int64_t) {
    float sums[kHidden / 2];
    Operand<kFeatureBlocks> operand;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = min(first + lane.g + 8 * half, rows - 1);
      load_half(sums, table + static_cast<int64_t>(elements[row]) * kHidden + 8 * lane.t, half);
#pragma unroll
      for (int b = 0; b < kFeatureBlocks; ++b) {
        const int column = 32 * b + 8 * lane.t;
        const bool is_inside = column < FEATURES;
        const float4* const source =
            reinterpret_cast<const float4*>(features + row * FEATURES + (is_inside ? column : 0));
        const float4 low = source[0], high = source[1];
        operand.a[2 * b][half] = is_inside ? pack2<scalar_t>(low.x, low.y) : 0;
        operand.a[2 * b][2 + half] = is_inside ? pack2<scalar_t>(low.z, low.w) : 0;
        operand.a[2 * b + 1][half] = is_inside ? pack2<scalar_t>(high.x, high.y) : 0;
        operand.a[2 * b + 1][2 + half] = is_inside ? pack2<scalar_t>(high.z, high.w) : 0;
      }
    }
    wgmma_fence();
    multiply<kHidden>(sums, operand, w, kHidden, 0, 0, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(sums);
    feed_forward(sums, norm, d, eps, lane);
    store_sums(out, sums, first, rows, kHidden, lane);
  });
}
#endif
