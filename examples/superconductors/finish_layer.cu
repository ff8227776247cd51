// All of a layer that follows attention, with its weights in shared memory:
//   s = x + mixed O^T (x itself without `mixed`);  out = s + swiglu(rmsnorm(s) G^T) D^T
#include "rows.cuh"

#include "common/activation.cuh"

constexpr int kInner = INNER;
constexpr int kThreads = 384;
constexpr int kRow = kSwizzleRowBytes;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    finish_layer(const scalar_t* x, const scalar_t* norm, const scalar_t* gate_up,
                 const scalar_t* down, const scalar_t* mixed, const scalar_t* mixed_weight,
                 scalar_t* out, int64_t rows, float eps) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* const smem = aligned(dynamic);
  // D; then G, 32 rows of the gate and the 32 of `up` that they multiply in turn; then O.
  constexpr int kDownBytes = kInner / kChunk * kHidden * kRow;
  constexpr int kGateBytes = kHidden / kChunk * 2 * kInner * kRow;
  copy_matrix<kInner>(smem, down, kHidden, kHidden, [](int row) { return result_of(row); });
  copy_matrix<kHidden>(smem + kDownBytes, gate_up, 2 * kInner, 2 * kInner, [](int row) {
    const int is_up = row >= kInner, r = result_of(row - is_up * kInner);
    return r / 32 * 64 + 32 * is_up + r % 32;
  });
  const bool has_mixed = mixed != nullptr && mixed_weight != nullptr;
  if (has_mixed)
    copy_matrix<kHidden>(smem + kDownBytes + kGateBytes, mixed_weight, kHidden, kHidden,
                         [](int row) { return result_of(row); });
  fence_async_proxy();
  __syncthreads();  // SAFETY: after it, wgmma reads what all threads have written.
  const unsigned d = smem_address(smem), g = d + kDownBytes, o = g + kGateBytes;
  const Lane lane;
  const int64_t tiles = (rows + kGroupRows - 1) / kGroupRows;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / 128);
  for (int64_t tile = blockIdx.x * (kThreads / 128) + threadIdx.x / 128; tile < tiles;
       tile += stride) {
    const int64_t first = tile * kGroupRows + threadIdx.x % 128 / 32 * 16;
    float sums[kHidden / 2];
    Operand<kBlocks> operand;
    load_sums(sums, x, first, rows, lane);
    if (has_mixed) {
      load_operand(operand, mixed, first, rows, lane);
      wgmma_fence();
      multiply<kHidden>(sums, operand, o, kHidden, 0, 0, true);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(sums);
    }
    normalise(operand, sums, norm, eps, lane);
#pragma unroll 1
    for (int f = 0; f < kInner / 32; ++f) {
      float gate_and_up[32];
      wgmma_fence();
      multiply<64>(gate_and_up, operand, g, 2 * kInner, 64 * f, 0, false);
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
              pack2<scalar_t>(silu(gate[0]) * up[0], silu(gate[1]) * up[1]);
        }
      wgmma_fence();
      multiply<kHidden>(sums, inner, d, kHidden, 0, f, true);
      wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_pin(sums);
    store_sums(out, sums, first, rows, kHidden, lane);
  }
}
