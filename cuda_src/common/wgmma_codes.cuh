// wgmma on 8-bit codes: 64 x N += A (64 x 32) B (32 x N). Both operands are K-major in shared
// memory. Accumulators are in registers as in wgmma.cuh: float for e4m3 (accurate to about 14
// bits), int32 for int8.
#pragma once

#include "common/wgmma.cuh"

#define ENGINE_I(i)                                                                     \
  "+r"(acc[i]), "+r"(acc[i + 1]), "+r"(acc[i + 2]), "+r"(acc[i + 3]), "+r"(acc[i + 4]), \
      "+r"(acc[i + 5]), "+r"(acc[i + 6]), "+r"(acc[i + 7])
#define ENGINE_I16 ENGINE_I(0)
#define ENGINE_I32 ENGINE_I16, ENGINE_I(8)
#define ENGINE_I48 ENGINE_I32, ENGINE_I(16)
#define ENGINE_I64 ENGINE_I48, ENGINE_I(24)
#define ENGINE_I80 ENGINE_I64, ENGINE_I(32)
#define ENGINE_I96 ENGINE_I80, ENGINE_I(40)
#define ENGINE_I112 ENGINE_I96, ENGINE_I(48)
#define ENGINE_I128 ENGINE_I112, ENGINE_I(56)
#define ENGINE_I160 ENGINE_I128, ENGINE_I(64), ENGINE_I(72)
#define ENGINE_I192 ENGINE_I160, ENGINE_I(80), ENGINE_I(88)
#define ENGINE_I224 ENGINE_I192, ENGINE_I(96), ENGINE_I(104)
#define ENGINE_I256 ENGINE_I224, ENGINE_I(112), ENGINE_I(120)

// If `accumulate` is false, the sums start at zero, whatever the registers hold.
template <int kN>
__device__ __forceinline__ void wgmma_codes(float (&acc)[kN / 2], uint64_t a, uint64_t b,
                                            bool accumulate);
template <int kN>
__device__ __forceinline__ void wgmma_codes(int (&acc)[kN / 2], uint64_t a, uint64_t b,
                                            bool accumulate);

// a, b and s are operand numbers: these operands follow the N / 2 accumulators.
#define ENGINE_WGMMA_CODES(N, a, b, s)                                                    \
  template <>                                                                             \
  __device__ __forceinline__ void wgmma_codes<N>(float (&acc)[N / 2], uint64_t desc_a,    \
                                                 uint64_t desc_b, bool accumulate) {      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #s                                  \
                 ", 0;\n"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" ENGINE_L##N \
                 "}, %" #a ", %" #b ", p, 1, 1;\n}"                                       \
                 : ENGINE_O##N                                                            \
                 : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)));          \
  }                                                                                       \
  template <>                                                                             \
  __device__ __forceinline__ void wgmma_codes<N>(int (&acc)[N / 2], uint64_t desc_a,      \
                                                 uint64_t desc_b, bool accumulate) {      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #s                                  \
                 ", 0;\n"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" ENGINE_L##N     \
                 "}, %" #a ", %" #b ", p;\n}"                                             \
                 : ENGINE_I##N                                                            \
                 : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)));          \
  }
ENGINE_WGMMA_CODES(16, 8, 9, 10)
ENGINE_WGMMA_CODES(32, 16, 17, 18)
ENGINE_WGMMA_CODES(48, 24, 25, 26)
ENGINE_WGMMA_CODES(64, 32, 33, 34)
ENGINE_WGMMA_CODES(80, 40, 41, 42)
ENGINE_WGMMA_CODES(96, 48, 49, 50)
ENGINE_WGMMA_CODES(112, 56, 57, 58)
ENGINE_WGMMA_CODES(128, 64, 65, 66)
ENGINE_WGMMA_CODES(160, 80, 81, 82)
ENGINE_WGMMA_CODES(192, 96, 97, 98)
ENGINE_WGMMA_CODES(224, 112, 113, 114)
ENGINE_WGMMA_CODES(256, 128, 129, 130)

// Makes the compiler assume that these registers change here, so it moves no access to them across
// this point.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(int (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(acc[i])::"memory");
}
