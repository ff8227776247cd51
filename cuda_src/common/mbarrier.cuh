// mbarriers (sm_90 up), and bulk copies without a tensor map, which complete on an mbarrier.
//
// Protocol: one thread announces the expected bytes on an mbarrier and issues copies; the copies
// write shared memory and count their bytes on the mbarrier; threads that need the data wait for
// the mbarrier's phase. Each stage of a ring has two mbarriers: the producer's copies complete on
// `full`, and consumers arrive on `empty` once the stage may be overwritten. Shared-memory
// addresses are 32-bit, as in PTX.
//
// Public: sm_90 up.
#pragma once

#include "common/cp_async.cuh"  // smem_address

// Initialises an mbarrier (8 bytes, 8-byte aligned) whose phases complete after `arrivals`
// arrivals, plus the bytes announced. One thread calls it, and then mbarrier_init_fence.
__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to copies and to the cluster; a block or cluster barrier must
// follow before other threads use them.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives once, for the calling thread. Its earlier accesses are ordered before those of threads
// that wait for the phase.
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once and announces `bytes` that copies will write, whether they have been started or not:
// the phase completes only after those bytes. The thread that starts the copies calls it.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives when all earlier cp_async copies of this thread have landed; this counts as one of the
// mbarrier's expected arrivals.
__device__ __forceinline__ void mbarrier_arrive_cp_async(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives on the mbarrier at the same offset in CTA `rank` of the cluster, which may be this CTA.
//
// NOTE: .release.cluster is omitted because it would fence all memory. The plain arrival suffices
// if the released memory was only read, by wgmma or by completed loads.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier, unsigned rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Waits until the phase of this parity (0 for the first) has completed; every thread that reads the
// data must call it. On a new mbarrier parity 1
// counts as completed, so a producer finds all stages empty at the start.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Returns, without waiting, whether the phase of this parity has completed.
__device__ __forceinline__ bool mbarrier_test_wait(unsigned barrier, unsigned parity) {
  int over;
  asm volatile(
      "{\n.reg .pred over;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.s32 %0, 1, 0, over;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}

// Waits like mbarrier_wait, and acquires the writes of other blocks of the cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Orders ordinary shared-memory accesses, by this thread and by threads it has synchronised with,
// before accesses by TMA and wgmma. If another thread issues those, a barrier must follow the
// fence.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until readers that use ordinary loads or ldmatrix have released memory that a bulk copy
// will overwrite. Every thread that issues such a copy must call it. SAFETY: an arrival orders
// these reads before ordinary writes, but not before bulk copies. Without the fence, a copy may
// overwrite data that ldmatrix has not read yet.
__device__ __forceinline__ void mbarrier_wait_to_overwrite(unsigned barrier, unsigned parity) {
  mbarrier_wait(barrier, parity);
  fence_async_proxy();
}

// Starts a copy of `bytes` contiguous bytes to shared memory, counted on an mbarrier; both
// addresses and `bytes` must be multiples of 16. One thread calls it.
__device__ __forceinline__ void bulk_load(unsigned to, const void* from, unsigned bytes,
                                          unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
