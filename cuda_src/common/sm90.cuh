// Hopper's own instructions (sm_90a), one thin wrapper each: mbarriers, TMA, clusters, registers.
//
// How they fit together: one thread tells an mbarrier how many bytes will come and asks TMA for
// tiles; TMA writes shared memory and counts the bytes on the mbarrier; whoever wants the tile
// waits for the mbarrier's phase. A second mbarrier a stage, on which readers arrive, says that
// the stage may be overwritten. Addresses of shared memory are 32-bit, as PTX has them.
#pragma once

#include "common/cp_async.cuh"  // smem_address
#include "common/pdl.cuh"
#include "common/types.cuh"

// A CUtensorMap, encoded on the host (engine/kernels/_tensor_map.py). Kernels take it as
// `const __grid_constant__`: TMA wants its address in parameter or constant space.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// ---- mbarriers -------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Shows initialised mbarriers to TMA and to the cluster; a block or cluster barrier must follow
// before others use them.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once and announces `bytes` that TMA will write: the phase ends when they are there too.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives on the mbarrier at the same place in block `rank` of the cluster (one's own is allowed).
//
// NOTE: not .release.cluster, which costs a fence of all memory (it halved gemm's speed). Enough
// where what is let go was only read, by wgmma or loads that are over.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier, unsigned rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Waits until the phase of this parity (0 for the first) is over. On a fresh mbarrier parity 1 is
// over at once: that is how a producer finds all stages empty at the start.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Where a producer or a consumer is in a ring of stages: the stage's index, and the parity of the
// phase that its mbarriers must have completed before the stage is used. A consumer starts with
// parity 0, a producer with 1: on a new mbarrier the phase before the first one counts as over.
template <int kStages>
struct PipelineState {
  int index = 0;
  unsigned phase;

  __device__ __forceinline__ explicit PipelineState(unsigned phase) : phase(phase) {}
  __device__ __forceinline__ void advance() {
    if (++index == kStages) index = 0, phase ^= 1;
  }
};

// The same without waiting: whether that phase is over.
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

// ---- TMA -------------------------------------------------------------------------------------

__device__ __forceinline__ void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at (column, row) of a matrix to shared memory; what lies outside becomes zero.
__device__ __forceinline__ void tma_load_2d(unsigned to, const TensorMap* map, int column, int row,
                                            unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same to every block of the cluster whose bit is set in `blocks`, at the same place in each,
// counted on the mbarrier at the same place in each.
__device__ __forceinline__ void tma_load_2d_multicast(unsigned to, const TensorMap* map, int column,
                                                      int row, unsigned barrier,
                                                      unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// The same of an array of four axes.
__device__ __forceinline__ void tma_load_4d(unsigned to, const TensorMap* map, int x, int y, int z,
                                            int w, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void tma_load_4d_multicast(unsigned to, const TensorMap* map, int x,
                                                      int y, int z, int w, unsigned barrier,
                                                      unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "h"(blocks)
      : "memory");
}

// Brings the box to the L2 cache only. Safe at any time, also before its last writer has ended.
__device__ __forceinline__ void tma_prefetch_2d(const TensorMap* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(column),
               "r"(row)
               : "memory");
}

__device__ __forceinline__ void tma_prefetch_4d(const TensorMap* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// Copies `bytes` as they lie, without a map; addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_load(unsigned to, const void* from, unsigned bytes,
                                          unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Orders ordinary accesses to shared memory, one's own and those of threads that one has waited for,
// before TMA's and wgmma's. After one's own writes a barrier must follow, if others start these.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until others have let memory go that they read by ordinary loads or ldmatrix, and that TMA is
// to overwrite. Every thread that starts a copy must call it. SAFETY: an arrival orders such reads
// before ordinary writes, not before TMA's. Without the fence attention_decode sometimes read what came
// next into that place.
__device__ __forceinline__ void mbarrier_wait_to_overwrite(unsigned barrier, unsigned parity) {
  mbarrier_wait(barrier, parity);
  fence_async_proxy();
}

// ---- from shared memory ------------------------------------------------------------------------

// Copies a box from shared memory to (column, row) of a matrix, asynchronously; what lies outside is
// left out. Needs a commit; the box must have been written before a fence_async_proxy.
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, int column, int row,
                                             unsigned from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all groups of this thread but the last kPending have read shared memory: it may be
// written again.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all groups of this thread are over, and what they wrote can be seen.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- one thread of a warp ------------------------------------------------------------------------

// True in one thread of a converged warp. Unlike a comparison with threadIdx.x it tells ptxas that
// only one thread goes on: copies then take their operands from uniform registers, where they
// would move them there for each lane in a loop.
__device__ __forceinline__ bool elect_one() {
  int is_elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.s32 %0, 1, 0, p;\n}"
               : "=r"(is_elected));
  return is_elected != 0;
}

// ---- clusters --------------------------------------------------------------------------------

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster; the warps need not be converged.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// Its two halves, for work in between. The arrival orders no memory.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The same without ordering any memory: cheaper, where nobody reads what another wrote.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile(
      "barrier.cluster.arrive.relaxed;\n"
      "barrier.cluster.wait;" ::
          : "memory");
}

// Sends 16 bytes to the same place in block `rank`, counted on the mbarrier at its place there.
// No fence is needed: who has waited for that mbarrier (mbarrier_wait_cluster) sees them.
__device__ __forceinline__ void cluster_send(unsigned to, unsigned barrier, unsigned rank, float a,
                                             float b, float c, float d) {
  asm volatile(
      "{\n.reg .b32 there, counter;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[there], {%3, %4, %5, %6}, [counter];\n}" ::"r"(to),
      "r"(barrier), "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}
// The same of 8 bytes.
__device__ __forceinline__ void cluster_send(unsigned to, unsigned barrier, unsigned rank, float a,
                                             float b) {
  asm volatile(
      "{\n.reg .b32 there, counter;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
      "[there], {%3, %4}, [counter];\n}" ::"r"(to),
      "r"(barrier), "r"(rank), "f"(a), "f"(b)
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait_cluster(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Barrier `id` of the block, 1 to 15 (0 is __syncthreads), which completes when kThreads threads
// have come by; those of `arrive` do not wait.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// ---- registers -------------------------------------------------------------------------------

// Moves registers between warpgroups; every warp of the warpgroup must come by. Needs a
// __launch_bounds__ that says how many blocks share a multiprocessor.
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- wgmma -----------------------------------------------------------------------------------

// Orders the registers that wgmma will read or write after what was done to them before.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending of this warpgroup's latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler that these registers change here, so that it moves no access to them across.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// A tile in shared memory with rows of 128 bytes along k, as TMA's 128-byte swizzle writes it:
// atoms of 8 rows, 1024 bytes apart, aligned to 1024. To step along k inside the row add
// bytes / 16.
__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned address) {
  return static_cast<unsigned long long>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) |
         (1ull << 62);
}

// ---- stmatrix --------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c,
                                            unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The first two of them: lanes 0 to 15 give the addresses.
__device__ __forceinline__ void stmatrix_x2(unsigned address, unsigned a, unsigned b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a),
               "r"(b)
               : "memory");
}
