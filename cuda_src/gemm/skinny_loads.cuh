// Global loads of the skinny kernels, with the cache hints and ordering they need.
#pragma once

#include "common/types.cuh"

// Loads 16 bytes that are read only once, from memory not written while the kernel runs. volatile
// keeps the load where it stands in the source: it is not deferred to the use of its value.
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

// Loads 16 bytes from L2: a later load from the same address sees writes by other blocks.
__device__ __forceinline__ Vec<scalar_t, kVec> load_from_l2(const scalar_t* from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return *reinterpret_cast<Vec<scalar_t, kVec>*>(&v);
}
