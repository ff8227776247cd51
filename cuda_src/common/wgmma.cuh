// wgmma (sm_90a): 64 x N += A (64 x 16) B (16 x N), operands in shared memory, accumulators in
// registers.
//
// Thread t of the warpgroup (warp w = t / 32, lane l) holds, for each group j of 8 columns,
//   acc[4 j], acc[4 j + 1]      row 16 w + l / 4,      columns 8 j + 2 (l % 4) and the next
//   acc[4 j + 2], acc[4 j + 3]  row 16 w + l / 4 + 8,  the same columns
// PTX requires every register to be named, so macros spell out the instruction for each N.
//
// Public: sm_90a, float16 and bfloat16.
#pragma once

#include "common/types.cuh"

#define ENGINE_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ENGINE_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define ENGINE_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define ENGINE_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define ENGINE_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define ENGINE_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define ENGINE_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define ENGINE_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define ENGINE_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define ENGINE_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define ENGINE_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define ENGINE_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define ENGINE_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define ENGINE_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define ENGINE_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define ENGINE_R15 "%120, %121, %122, %123, %124, %125, %126, %127"

#define ENGINE_L16 ENGINE_R0
#define ENGINE_L32 ENGINE_L16 ", " ENGINE_R1
#define ENGINE_L48 ENGINE_L32 ", " ENGINE_R2
#define ENGINE_L64 ENGINE_L48 ", " ENGINE_R3
#define ENGINE_L80 ENGINE_L64 ", " ENGINE_R4
#define ENGINE_L96 ENGINE_L80 ", " ENGINE_R5
#define ENGINE_L112 ENGINE_L96 ", " ENGINE_R6
#define ENGINE_L128 ENGINE_L96 ", " ENGINE_R6 ", " ENGINE_R7
#define ENGINE_L144 ENGINE_L128 ", " ENGINE_R8
#define ENGINE_L160 ENGINE_L128 ", " ENGINE_R8 ", " ENGINE_R9
#define ENGINE_L176 ENGINE_L160 ", " ENGINE_R10
#define ENGINE_L192 ENGINE_L160 ", " ENGINE_R10 ", " ENGINE_R11
#define ENGINE_L208 ENGINE_L192 ", " ENGINE_R12
#define ENGINE_L224 ENGINE_L192 ", " ENGINE_R12 ", " ENGINE_R13
#define ENGINE_L240 ENGINE_L224 ", " ENGINE_R14
#define ENGINE_L256 ENGINE_L224 ", " ENGINE_R14 ", " ENGINE_R15

#define ENGINE_O(i)                                                                     \
  "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), "+f"(acc[i + 4]), \
      "+f"(acc[i + 5]), "+f"(acc[i + 6]), "+f"(acc[i + 7])
#define ENGINE_O16 ENGINE_O(0)
#define ENGINE_O32 ENGINE_O16, ENGINE_O(8)
#define ENGINE_O48 ENGINE_O32, ENGINE_O(16)
#define ENGINE_O64 ENGINE_O48, ENGINE_O(24)
#define ENGINE_O80 ENGINE_O64, ENGINE_O(32)
#define ENGINE_O96 ENGINE_O80, ENGINE_O(40)
#define ENGINE_O112 ENGINE_O96, ENGINE_O(48)
#define ENGINE_O128 ENGINE_O96, ENGINE_O(48), ENGINE_O(56)
#define ENGINE_O144 ENGINE_O128, ENGINE_O(64)
#define ENGINE_O160 ENGINE_O128, ENGINE_O(64), ENGINE_O(72)
#define ENGINE_O176 ENGINE_O160, ENGINE_O(80)
#define ENGINE_O192 ENGINE_O160, ENGINE_O(80), ENGINE_O(88)
#define ENGINE_O208 ENGINE_O192, ENGINE_O(96)
#define ENGINE_O224 ENGINE_O192, ENGINE_O(96), ENGINE_O(104)
#define ENGINE_O240 ENGINE_O224, ENGINE_O(112)
#define ENGINE_O256 ENGINE_O224, ENGINE_O(112), ENGINE_O(120)

#if ENGINE_DTYPE == 0
#error "wgmma.cuh multiplies scalar_t, which must be float16 or bfloat16"
#endif

#if ENGINE_DTYPE == 1
#define ENGINE_WGMMA_TYPES ".f32.f16.f16 "
#else
#define ENGINE_WGMMA_TYPES ".f32.bf16.bf16 "
#endif

// The instruction for kN columns.
template <int kN>
struct Wgmma;

// a, b, s, ta and tb are operand numbers: these operands follow the kN / 2 accumulators.
#define ENGINE_WGMMA(N, a, b, s, ta, tb)                                                           \
  template <>                                                                                      \
  struct Wgmma<N> {                                                                                \
    template <bool kTransposedA, bool kTransposedB>                                                \
    static __device__ __forceinline__ void start(float (&acc)[N / 2], uint64_t desc_a,             \
                                                 uint64_t desc_b, bool accumulate) {               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #s                                         \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16" ENGINE_WGMMA_TYPES "{" ENGINE_L##N \
                   "}, %" #a ", %" #b ", p, 1, 1, %" #ta ", %" #tb ";\n}"                          \
                   : ENGINE_O##N                                                                   \
                   : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)),                  \
                     "n"(static_cast<int>(kTransposedA)), "n"(static_cast<int>(kTransposedB)));    \
    }                                                                                              \
  };
ENGINE_WGMMA(16, 8, 9, 10, 11, 12)
ENGINE_WGMMA(32, 16, 17, 18, 19, 20)
ENGINE_WGMMA(48, 24, 25, 26, 27, 28)
ENGINE_WGMMA(64, 32, 33, 34, 35, 36)
ENGINE_WGMMA(80, 40, 41, 42, 43, 44)
ENGINE_WGMMA(96, 48, 49, 50, 51, 52)
ENGINE_WGMMA(112, 56, 57, 58, 59, 60)
ENGINE_WGMMA(128, 64, 65, 66, 67, 68)
ENGINE_WGMMA(144, 72, 73, 74, 75, 76)
ENGINE_WGMMA(160, 80, 81, 82, 83, 84)
ENGINE_WGMMA(176, 88, 89, 90, 91, 92)
ENGINE_WGMMA(192, 96, 97, 98, 99, 100)
ENGINE_WGMMA(208, 104, 105, 106, 107, 108)
ENGINE_WGMMA(224, 112, 113, 114, 115, 116)
ENGINE_WGMMA(240, 120, 121, 122, 123, 124)
ENGINE_WGMMA(256, 128, 129, 130, 131, 132)

// Starts acc += A B, of the tiles that the descriptors name; A and B are scalar_t (__half or
// __nv_bfloat16). If `accumulate` is false, the sums start at zero, whatever the registers hold.
// kN is a multiple of 16, at most 256. A tile's rows lie along k, or with kTransposedA or
// kTransposedB across k (wgmma_descriptor_transposed). The four warps of the warpgroup must call
// it, converged; acc may be read after wgmma_wait.
template <int kN, bool kTransposedA = false, bool kTransposedB = false>
__device__ __forceinline__ void wgmma(float (&acc)[kN / 2], uint64_t a, uint64_t b,
                                      bool accumulate) {
  Wgmma<kN>::template start<kTransposedA, kTransposedB>(acc, a, b, accumulate);
}

// ---- ordering and descriptors -------------------------------------------------------------------

// Orders earlier accesses to registers before wgmma reads or writes them: the warpgroup calls it
// before the first wgmma, and again once it has touched acc.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Closes the group of the wgmmas since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the kPending latest groups of this warpgroup are still running. The others
// have read their tiles, which may then be overwritten, and written their sums.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Makes the compiler assume that these registers change here, so it moves no access to them across
// this point.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// Descriptor of a shared-memory tile with 128-byte rows along k in TMA's 128-byte swizzle: atoms of
// 8 rows, 1024 bytes apart and aligned to 1024. To step along k within a row, add bytes / 16.
__device__ __forceinline__ uint64_t wgmma_descriptor(unsigned address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) |
         (1ull << 62);
}

// Descriptor of a tile whose rows of 128 bytes hold 64 values across k (A's rows, B's columns) and
// lie one after another along k, in TMA's 128-byte swizzle. Further groups of 64 values are
// `chunk_bytes` apart. To step along k by 16, add 2048 bytes / 16.
__device__ __forceinline__ uint64_t wgmma_descriptor_transposed(unsigned address,
                                                                unsigned chunk_bytes) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
         (static_cast<uint64_t>(chunk_bytes >> 4) << 16) | (64ull << 32) | (1ull << 62);
}
