// Programmatic dependent launch: the next kernel in a stream may start before this one has ended.
// Before sm_90 both functions do nothing, and a kernel starts once the preceding one has ended.
//
// Public: sm_80 up.
#pragma once

#include "common/types.cuh"

// Lets the next kernel in the stream start once every block of this kernel has called pdl_trigger()
// or ended. The next kernel must still call pdl_wait() before it relies on any effect of this one.
__device__ __forceinline__ void pdl_trigger() {
  if constexpr (kArch >= 900) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the preceding kernels have ended and their writes are visible. SAFETY: a kernel
// launched with `pdl=True` must call it, in every block, before it reads or
// writes anything that another kernel writes or reads. Without that launch attribute it returns
// immediately.
__device__ __forceinline__ void pdl_wait() {
  if constexpr (kArch >= 900) asm volatile("griddepcontrol.wait;" ::: "memory");
}
