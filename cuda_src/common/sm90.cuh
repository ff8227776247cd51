// Thin wrappers around Hopper's warp and warpgroup instructions (sm_90a). mbarriers, TMA, clusters
// and wgmma have their own headers.
//
// Public: sm_90a.
#pragma once

#include "common/cluster.cuh"
#include "common/named_barrier.cuh"
#include "common/tma.cuh"

// ---- warps ------------------------------------------------------------------------

// True in exactly one lane; the whole warp must call it, converged. Unlike a comparison with
// threadIdx.x, it tells ptxas that only one thread continues, so copy operands stay in uniform
// registers instead of being moved there in a loop over the lanes.
__device__ __forceinline__ bool elect_one() {
  int is_elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.s32 %0, 1, 0, p;\n}"
               : "=r"(is_elected));
  return is_elected != 0;
}

// Stores four 8 x 8 matrices of 16-bit values to shared memory: ldmatrix_x4 in reverse. Lane l
// passes the address of row l % 8 of matrix l / 8, 16-byte aligned. The whole warp must call it.
__device__ __forceinline__ void stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c,
                                            unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// stmatrix_x4 with each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_transposed(unsigned address, unsigned a, unsigned b,
                                                       unsigned c, unsigned d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

// Stores two 8 x 8 matrices, not transposed; lanes 0 to 15 pass the row addresses.
__device__ __forceinline__ void stmatrix_x2(unsigned address, unsigned a, unsigned b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a),
               "r"(b)
               : "memory");
}

// ---- warpgroups ------------------------------------------------------------------------------

// Move registers between warpgroups (setmaxnreg); every warp of the warpgroup must execute it.
// Requires __launch_bounds__ with a minimum number of blocks per SM.
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
