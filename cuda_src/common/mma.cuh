// Tensor-core products of 16-bit operands with float accumulation (mma.sync, ldmatrix; sm_80 up).
//
// mma_m16n8k16: D (16,8) += A (16,16) B (16,8). Lane 4 g + t (t < 4) holds, two values per register
// with the lower index in the lower half:
//   a[0] = A[g    ][2t, 2t+1]     a[2] = A[g    ][2t+8, 2t+9]
//   a[1] = A[g + 8][2t, 2t+1]     a[3] = A[g + 8][2t+8, 2t+9]
//   b[0] = B[2t, 2t+1][g]         b[1] = B[2t+8, 2t+9][g]
//   d[0], d[1] = D[g][2t, 2t+1]   d[2], d[3] = D[g + 8][2t, 2t+1]
//
// ldmatrix loads 8x8 matrices of 16-bit values: lane i passes the address of row i % 8 of matrix
// i / 8 (16 bytes, 16-byte aligned), and receives r[m] = M[g][2t, 2t+1] of matrix m, or
// M[2t, 2t+1][g] with .trans. So a row-major A tile, and a B tile stored as rows of n (B^T, like
// weights), load without .trans; a B tile stored as rows of k (V in attention) loads with .trans.
//
// Public: sm_80 up.
#pragma once

#include "common/cp_async.cuh"
#include "common/types.cuh"

// Load four matrices, as above, from a 32-bit shared-memory address or from a pointer: the whole
// warp must call it.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], unsigned smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* smem) {
  ldmatrix_x4(r, smem_address(smem));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], unsigned smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* smem) {
  ldmatrix_x4_trans(r, smem_address(smem));
}

// Transposes an 8x8 matrix: passed as ldmatrix loads it, returned as with .trans. The whole warp
// must call it.
__device__ __forceinline__ uint32_t movmatrix(uint32_t matrix) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// D += A B, fragments as above; T is the element type of A and B: __half or __nv_bfloat16. The
// whole warp must call it.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]);

#define ENGINE_MMA_M16N8K16(type, ptx_type)                                                 \
  template <>                                                                               \
  __device__ __forceinline__ void mma_m16n8k16<type>(float (&d)[4], const uint32_t (&a)[4], \
                                                     const uint32_t (&b)[2]) {              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ptx_type "." ptx_type             \
                 ".f32 "                                                                    \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"        \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));       \
  }

ENGINE_MMA_M16N8K16(__half, "f16")
ENGINE_MMA_M16N8K16(__nv_bfloat16, "bf16")
#undef ENGINE_MMA_M16N8K16
