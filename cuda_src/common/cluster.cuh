// Thread block clusters (sm_90 up): co-scheduled CTAs that access each other's shared memory
// (distributed shared memory). Portable kernels also use the first half of this file: on older
// chips a cluster is a single CTA.
//
// Public: sm_80 up.
#pragma once

#include "common/mbarrier.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"

// Whether the architecture compiled for has clusters.
constexpr bool kHasClusters = kArch >= 900;

// The number of blocks in this block's cluster, and its own place among them. Clusters are laid out
// along the grid's first axis.
__device__ __forceinline__ int cluster_size() {
  if constexpr (kHasClusters) {
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctaid.x;\n" : "=r"(size));
    return static_cast<int>(size);
  }
  return 1;
}
__device__ __forceinline__ int cluster_rank() {
  if constexpr (kHasClusters) {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return static_cast<int>(rank);
  }
  return 0;
}

// The index of this block's cluster along the grid's first axis, and the number of clusters.
__device__ __forceinline__ int cluster_index() {
  if constexpr (kHasClusters) {
    uint32_t index;
    asm("mov.u32 %0, %%clusterid.x;\n" : "=r"(index));
    return static_cast<int>(index);
  }
  return blockIdx.x;
}
__device__ __forceinline__ int num_clusters() {
  if constexpr (kHasClusters) {
    uint32_t count;
    asm("mov.u32 %0, %%nclusterid.x;\n" : "=r"(count));
    return static_cast<int>(count);
  }
  return gridDim.x;
}

// Barrier across all threads of the cluster; makes their earlier shared-memory writes visible to
// each other. `size` is cluster_size(): in a cluster of one block it is __syncthreads(). Every warp
// must call it converged.
__device__ __forceinline__ void cluster_sync(int size) {
  if constexpr (kHasClusters) {
    if (size > 1) {
      asm volatile(
          "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::
              : "memory");
      return;
    }
  }
  __syncthreads();
}

// Loads N floats (1, 2 or 4) from the shared memory of the cluster's CTA `rank`, at the offset that
// `address` has in this CTA; aligned to 4 N bytes. A cluster barrier must separate it from the
// write, and from the end of the CTA that is read.
template <int N>
__device__ __forceinline__ Vec<float, N> ld_shared_cluster(unsigned address, int rank) {
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  Vec<float, N> x;
  if constexpr (N == 4)
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "r"(remote)
                 : "memory");
  else if constexpr (N == 2)
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.v[0]), "=f"(x.v[1])
                 : "r"(remote)
                 : "memory");
  else
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x.v[0]) : "r"(remote) : "memory");
  return x;
}

// The same with a pointer to shared memory, for kernels that may run without clusters (`size` 1,
// which loads from `p`): N floats, or one.
template <int N>
__device__ __forceinline__ Vec<float, N> ld_shared_cluster(const float* p, int rank, int size) {
  if constexpr (kHasClusters) {
    if (size > 1) return ld_shared_cluster<N>(smem_address(p), rank);
  }
  return load_vec<float, N>(p);
}
__device__ __forceinline__ float ld_shared_cluster(const float* p, int rank, int size) {
  return ld_shared_cluster<1>(p, rank, size).v[0];
}

// Stores to the shared memory of CTA `rank`, at the offset that `p` has in this CTA. Without
// clusters (`size` 1) it stores to `p`.
__device__ __forceinline__ void st_shared_cluster(float* p, int rank, int size, float x) {
  if constexpr (kHasClusters) {
    if (size > 1) {
      asm volatile(
          "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
          "st.shared::cluster.f32 [there], %2;\n}" ::"r"(smem_address(p)),
          "r"(rank), "f"(x)
          : "memory");
      return;
    }
  }
  *p = x;
}

// An mbarrier in shared memory for bulk copies that one thread issues and all threads wait for. It
// has one phase: a kernel that copies again needs the functions of mbarrier.cuh.
struct TransactionBarrier {
  uint64_t state;

  // One thread calls it; a __syncthreads() must follow before other threads use the barrier.
  __device__ __forceinline__ void init() {
    if constexpr (kHasClusters) {
      mbarrier_init(smem_address(&state), 1);
      mbarrier_init_fence();
    }
  }
  // One thread calls it, before or after issuing the copies.
  __device__ __forceinline__ void arrive_expect_tx(uint32_t bytes) {
    if constexpr (kHasClusters) {
      mbarrier_arrive_expect_tx(smem_address(&state), bytes);
    }
  }
  // Waits for the bytes announced. Every thread that reads them calls it.
  __device__ __forceinline__ void wait() {
    if constexpr (kHasClusters) {
      mbarrier_wait(smem_address(&state), 0);
    }
  }
  // Starts a copy; `bytes` and both addresses must be multiples of 16. One thread calls it.
  __device__ __forceinline__ void bulk_load(void* smem, const void* gmem, uint32_t bytes) {
    if constexpr (kHasClusters) {
      ::bulk_load(smem_address(smem), gmem, bytes, smem_address(&state));
    }
  }
};

// ---- sm_90 up -----------------------------------------------------------------------------------

// Barrier across all threads of the cluster, which makes their earlier shared-memory writes visible
// to each other; warps need not be converged.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// The two halves of the barrier, to overlap independent work. The arrival orders no memory
// accesses. Every thread calls both, in this order.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Cluster barrier without memory ordering: cheaper, for cases in which no block reads another's
// writes.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile(
      "barrier.cluster.arrive.relaxed;\n"
      "barrier.cluster.wait;" ::
          : "memory");
}

// Sends 16, 8 or 4 bytes (st.async) to the same offset in block `rank` and counts them on that
// block's mbarrier at the offset of `barrier`. No fence is needed: a thread sees the bytes once it
// has waited for that mbarrier (mbarrier_wait_cluster).
__device__ __forceinline__ void st_async(unsigned to, unsigned barrier, unsigned rank, float a,
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
__device__ __forceinline__ void st_async(unsigned to, unsigned barrier, unsigned rank, float a,
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
__device__ __forceinline__ void st_async(unsigned to, unsigned barrier, unsigned rank, float a) {
  asm volatile(
      "{\n.reg .b32 there, counter;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 "
      "[there], %3, [counter];\n}" ::"r"(to),
      "r"(barrier), "r"(rank), "f"(a)
      : "memory");
}
