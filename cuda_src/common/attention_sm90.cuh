// Helpers for Hopper attention kernels beyond sm90.cuh and wgmma.cuh: scalar shared-memory
// accesses, the P V product with P in registers, and stores of result rows.
#pragma once

#include "common/attention.cuh"
#include "common/pipeline_state.cuh"
#include "common/sm90.cuh"
#include "common/wgmma.cuh"

// ---- shared memory, by address -----------------------------------------------------------------

__device__ __forceinline__ void st_shared(unsigned to, int x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ int ld_shared(unsigned from) {
  int x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}
__device__ __forceinline__ float2 ld_shared_v2(unsigned from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from));
  return x;
}
__device__ __forceinline__ void st_shared_v2(unsigned to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void ld_shared_v4(unsigned from, unsigned& a, unsigned& b, unsigned& c,
                                             unsigned& d) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from));
}
__device__ __forceinline__ void st_shared_v4(unsigned to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
__device__ __forceinline__ void st_shared_v4(unsigned to, unsigned a, unsigned b, unsigned c,
                                             unsigned d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- wgmma with V ------------------------------------------------------------------------------

// Keeps the next wgmma_wait behind the computation of x (x >= 0). ptxas sees no dependence between
// the wait and the work meant to overlap with wgmma, and would hoist the wait above that work; it
// does not hoist it above a store. The store to shared address `address` is predicated off and
// never executes.
__device__ __forceinline__ void wgmma_wait_after(float x, unsigned address) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.f32 p, %0, 0fBF800000;\n@p st.shared.b32 [%1], %1;\n}" ::"f"(x),
      "r"(address)
      : "memory");
}

// acc (64 x kN) += A (64 x 16, in registers) B (16 x kN). V's rows are keys, so B has the
// descriptor wgmma_descriptor_transposed. Another wgmma's accumulators of 16 columns, packed in
// pairs of neighbours, form such an A.
template <int kN>
__device__ __forceinline__ void wgmma_transposed(float (&acc)[kN / 2], const unsigned (&a)[4],
                                                 uint64_t b);

// a0 to a3 and b are operand numbers: these operands follow the kN / 2 accumulators.
#define ENGINE_WGMMA_TRANSPOSED(N, a0, a1, a2, a3, b)                                              \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma_transposed<N>(float (&acc)[N / 2], const unsigned (&a)[4], \
                                                      uint64_t desc_b) {                           \
    asm volatile(                                                                                  \
        "{\n.reg .pred p;\nsetp.eq.b32 p, 1, 1;\n"                                                 \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16" ENGINE_WGMMA_TYPES "{" ENGINE_L##N            \
        "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, 1;\n}"                     \
        : ENGINE_O##N                                                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b));                                \
  }
ENGINE_WGMMA_TRANSPOSED(64, 32, 33, 34, 35, 36)
ENGINE_WGMMA_TRANSPOSED(96, 48, 49, 50, 51, 52)
ENGINE_WGMMA_TRANSPOSED(128, 64, 65, 66, 67, 68)
ENGINE_WGMMA_TRANSPOSED(192, 96, 97, 98, 99, 100)
ENGINE_WGMMA_TRANSPOSED(256, 128, 129, 130, 131, 132)

// ---- stores of result rows ----------------------------------------------------------------------

// Stores one of the thread's two rows of 64 x kColumns wgmma accumulators (i = 0: row lane / 4; i =
// 1: row lane / 4 + 8), multiplied by `factor`, up to column `columns`. The four threads of a row
// each hold two of every eight columns; they exchange them so that each stores whole groups of
// eight. All lanes must call it.
template <int kColumns>
__device__ __forceinline__ void store_row(scalar_t* row, bool exists, int columns, int lane_idx,
                                          const float* sum, int i, float factor) {
  const bool odd = lane_idx & 1, upper = lane_idx & 2;
#pragma unroll
  for (int j = 0; j < kColumns / 32; ++j) {
    unsigned x[4], y[4];
#pragma unroll
    for (int w = 0; w < 4; ++w)
      x[w] = pack2<scalar_t>(sum[16 * j + 4 * w + 2 * i] * factor,
                             sum[16 * j + 4 * w + 2 * i + 1] * factor);
    // Exchange with lane ^ 1. Even lanes then hold word pairs of groups 0 and 2, odd lanes those of
    // groups 1 and 3.
#pragma unroll
    for (int w = 0; w < 4; w += 2) {
      const unsigned other = __shfl_xor_sync(~0u, odd ? x[w] : x[w + 1], 1);
      y[w] = odd ? other : x[w];
      y[w + 1] = odd ? x[w + 1] : other;
    }
    // Exchange with lane ^ 2. Each lane then holds all four words of group lane % 4.
    const unsigned low = __shfl_xor_sync(~0u, upper ? y[0] : y[2], 2);
    const unsigned high = __shfl_xor_sync(~0u, upper ? y[1] : y[3], 2);
    const uint4 eight =
        upper ? make_uint4(low, high, y[2], y[3]) : make_uint4(y[0], y[1], low, high);
    const int column = 32 * j + 8 * (lane_idx % 4);
    if (exists && column < columns) *reinterpret_cast<uint4*>(row + column) = eight;
  }
}
