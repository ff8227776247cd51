// Global loads of the skinny kernels, with the cache hints and the order that they need.
#pragma once

#include "common/types.cuh"

// 16 bytes that are read once, from memory that is not written while the kernel runs. volatile: the
// load is issued where it stands in the source, not where its value is used.
__device__ __forceinline__ uint4 load_once(const scalar_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ Vec<scalar_t, kVec> load_vec_once(const scalar_t* p) {
  const uint4 v = load_once(p);
  return *reinterpret_cast<const Vec<scalar_t, kVec>*>(&v);
}

// 16 bytes from L2: a later read of the same address sees writes by other blocks.
__device__ __forceinline__ Vec<scalar_t, kVec> load_from_l2(const scalar_t* from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return *reinterpret_cast<Vec<scalar_t, kVec>*>(&v);
}
