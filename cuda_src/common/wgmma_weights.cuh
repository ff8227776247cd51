// wgmma with the weights as operand A in registers; in common/wgmma.cuh both operands are in shared
// memory.
#pragma once

#include "common/wgmma.cuh"

// acc (64 x kN) += A (64 x 16) B (16 x kN). Lane 4 g + t of warp w holds rows 16 w + g (a[0], a[2])
// and 16 w + g + 8 (a[1], a[3]) of A, columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2],
// a[3]). If `accumulate` is false, the sums start at zero.
template <int kN>
__device__ __forceinline__ void wgmma_weights(float (&acc)[kN / 2], const uint32_t (&a)[4],
                                              uint64_t b, bool accumulate);

// a0 to a3, b and s are operand numbers: these operands follow the kN / 2 accumulators.
#define ENGINE_WGMMA_WEIGHTS(N, a0, a1, a2, a3, b, s)                                            \
  template <>                                                                                    \
  __device__ __forceinline__ void wgmma_weights<N>(float (&acc)[N / 2], const uint32_t (&a)[4],  \
                                                   uint64_t desc_b, bool accumulate) {           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #s                                         \
                 ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16" ENGINE_WGMMA_TYPES "{" ENGINE_L##N \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, 0;\n}"          \
                 : ENGINE_O##N                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b),                      \
                   "r"(static_cast<int>(accumulate)));                                           \
  }
ENGINE_WGMMA_WEIGHTS(16, 8, 9, 10, 11, 12, 13)
ENGINE_WGMMA_WEIGHTS(32, 16, 17, 18, 19, 20, 21)
ENGINE_WGMMA_WEIGHTS(48, 24, 25, 26, 27, 28, 29)
ENGINE_WGMMA_WEIGHTS(64, 32, 33, 34, 35, 36, 37)
ENGINE_WGMMA_WEIGHTS(80, 40, 41, 42, 43, 44, 45)
ENGINE_WGMMA_WEIGHTS(96, 48, 49, 50, 51, 52, 53)
ENGINE_WGMMA_WEIGHTS(112, 56, 57, 58, 59, 60, 61)
ENGINE_WGMMA_WEIGHTS(128, 64, 65, 66, 67, 68, 69)
ENGINE_WGMMA_WEIGHTS(144, 72, 73, 74, 75, 76, 77)
ENGINE_WGMMA_WEIGHTS(160, 80, 81, 82, 83, 84, 85)
ENGINE_WGMMA_WEIGHTS(192, 96, 97, 98, 99, 100, 101)
ENGINE_WGMMA_WEIGHTS(208, 104, 105, 106, 107, 108, 109)
ENGINE_WGMMA_WEIGHTS(224, 112, 113, 114, 115, 116, 117)
ENGINE_WGMMA_WEIGHTS(256, 128, 129, 130, 131, 132, 133)
