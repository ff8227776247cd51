// wgmma on e4m3 values: 64 x N += A (64 x 32) B (32 x N), with float accumulators laid out as in
// wgmma.cuh.
//
// Unlike with 16-bit types, both operands must be K-major: B is stored as N rows, which are keys or
// columns of V. A is in shared memory or in registers. In registers, thread t of a warp holds
// groups of four neighbours along k:
//   a[0], a[1]  rows t / 4 and t / 4 + 8, columns 4 (t % 4) and the next three
//   a[2], a[3]  the same rows, 16 columns to the right
#pragma once

#include "common/wgmma.cuh"

#define ENGINE_L72 ENGINE_L64 ", %32, %33, %34, %35"
#define ENGINE_O72 ENGINE_O64, "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35])
#define ENGINE_L136 ENGINE_L128 ", %64, %65, %66, %67"
#define ENGINE_O136 ENGINE_O128, "+f"(acc[64]), "+f"(acc[65]), "+f"(acc[66]), "+f"(acc[67])
#define ENGINE_E4M3 "k32.f32.e4m3.e4m3 "

// Descriptor of a tile with kRowBytes-byte rows along k, 128 (like wgmma_descriptor) or 64, in
// TMA's swizzle of the same width. To step along k within a row, add bytes / 16.
template <int kRowBytes>
__device__ __forceinline__ uint64_t wgmma_descriptor_rows(unsigned address) {
  static_assert(kRowBytes == 64 || kRowBytes == 128, "one row is one span of the swizzle");
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (1ull << 16) |
         (static_cast<uint64_t>(8 * kRowBytes >> 4) << 32) |
         ((kRowBytes == 64 ? 2ull : 1ull) << 62);
}

// If `accumulate` is false, the sums start at zero, whatever the registers hold.
template <int kN>
__device__ __forceinline__ void wgmma_fp8(float (&acc)[kN / 2], uint64_t a, uint64_t b,
                                          bool accumulate);
template <int kN>
__device__ __forceinline__ void wgmma_fp8(float (&acc)[kN / 2], const unsigned (&a)[4], uint64_t b,
                                          bool accumulate);

// a, b and s are operand numbers: these operands follow the N / 2 accumulators.
#define ENGINE_WGMMA_FP8(N, a, b, s)                                                 \
  template <>                                                                        \
  __device__ __forceinline__ void wgmma_fp8<N>(float (&acc)[N / 2], uint64_t desc_a, \
                                               uint64_t desc_b, bool accumulate) {   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #s                             \
                 ", 0;\n"                                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #N ENGINE_E4M3 "{" ENGINE_L##N  \
                 "}, %" #a ", %" #b ", p, 1, 1;\n}"                                  \
                 : ENGINE_O##N                                                       \
                 : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)));     \
  }
ENGINE_WGMMA_FP8(64, 32, 33, 34)
ENGINE_WGMMA_FP8(128, 64, 65, 66)

// wgmma_fp8 with A in registers.
#define ENGINE_WGMMA_FP8_REGISTERS(N, a0, a1, a2, a3, b, s)                                 \
  template <>                                                                               \
  __device__ __forceinline__ void wgmma_fp8<N>(float (&acc)[N / 2], const unsigned (&a)[4], \
                                               uint64_t desc_b, bool accumulate) {          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #s                                    \
                 ", 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N ENGINE_E4M3 "{" ENGINE_L##N         \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1;\n}"        \
                 : ENGINE_O##N                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b),                 \
                   "r"(static_cast<int>(accumulate)));                                      \
  }
ENGINE_WGMMA_FP8_REGISTERS(72, 36, 37, 38, 39, 40, 41)
ENGINE_WGMMA_FP8_REGISTERS(136, 68, 69, 70, 71, 72, 73)

// ---- transposing loads -------------------------------------------------------------------------

// Loads four 8 x 8 matrices of 16-bit values, transposed. Lane l passes the address of row l % 8 of
// matrix l / 8, and receives from each matrix column l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.
__device__ __forceinline__ void ldmatrix_transposed_x4(unsigned (&x)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// ---- packed values -----------------------------------------------------------------------------

// Returns NaN if either operand is NaN.
__device__ __forceinline__ unsigned half2_max(unsigned a, unsigned b) {
  unsigned d;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Converts two floats to halves; negative values become 0.
__device__ __forceinline__ unsigned half2_from_positive(float low, float high) {
  unsigned d;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Packs four values as e4m3, the first in the lowest byte; values above 448 saturate to 448.
__device__ __forceinline__ unsigned pack_e4m3(float a, float b, float c, float d) {
  unsigned x;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(x)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}
