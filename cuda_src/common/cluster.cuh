// Thread block clusters (sm_90 up): blocks that run together and reach each other's shared memory,
// distributed shared memory. In the first half are the parts that portable kernels use too: on
// older chips a cluster is one block.
#pragma once

#include "common/mbarrier.cuh"
#include "common/pdl.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define ENGINE_HAS_CLUSTERS 1
#else
#define ENGINE_HAS_CLUSTERS 0
#endif

__device__ __forceinline__ int cluster_size() {
#if ENGINE_HAS_CLUSTERS
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctaid.x;\n" : "=r"(size));
  return static_cast<int>(size);
#else
  return 1;
#endif
}

__device__ __forceinline__ int cluster_rank() {
#if ENGINE_HAS_CLUSTERS
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// The index of this block's cluster along the grid's first axis, and the number of clusters.
__device__ __forceinline__ int cluster_index() {
#if ENGINE_HAS_CLUSTERS
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;\n" : "=r"(index));
  return static_cast<int>(index);
#else
  return blockIdx.x;
#endif
}

__device__ __forceinline__ int num_clusters() {
#if ENGINE_HAS_CLUSTERS
  uint32_t count;
  asm("mov.u32 %0, %%nclusterid.x;\n" : "=r"(count));
  return static_cast<int>(count);
#else
  return gridDim.x;
#endif
}

// Barrier of all threads of the cluster: what one wrote to its shared memory before, all see after.
// In a cluster of one block it is __syncthreads().
__device__ __forceinline__ void cluster_sync(int size) {
#if ENGINE_HAS_CLUSTERS
  if (size > 1) {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::
            : "memory");
    return;
  }
#endif
  __syncthreads();
}

// Four floats of the shared memory of block `rank` of the cluster, at the place `p` has in this
// one's.
__device__ __forceinline__ float4 load_cluster(const float* p, int rank, int size) {
#if ENGINE_HAS_CLUSTERS
  if (size > 1) {
    uint32_t address;
    float4 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n"
                 : "=r"(address)
                 : "r"(smem_address(p)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
  }
#endif
  return *reinterpret_cast<const float4*>(p);
}

__device__ __forceinline__ float load_cluster_float(const float* p, int rank, int size) {
#if ENGINE_HAS_CLUSTERS
  if (size > 1) {
    uint32_t address;
    float v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n"
                 : "=r"(address)
                 : "r"(smem_address(p)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];\n" : "=f"(v) : "r"(address) : "memory");
    return v;
  }
#endif
  return *p;
}

// An mbarrier for bulk copies that one thread starts and all wait for. Used for one phase only.
struct BulkBarrier {
  uint64_t state;

  // By one thread; a __syncthreads() must follow before others use it.
  __device__ __forceinline__ void init() {
#if ENGINE_HAS_CLUSTERS
    mbarrier_init(smem_address(&state), 1);
    mbarrier_init_fence();
#endif
  }
  // By one thread, before or after the copies are issued.
  __device__ __forceinline__ void expect(uint32_t bytes) {
#if ENGINE_HAS_CLUSTERS
    mbarrier_arrive_expect_tx(smem_address(&state), bytes);
#endif
  }
  __device__ __forceinline__ void wait() {
#if ENGINE_HAS_CLUSTERS
    mbarrier_wait(smem_address(&state), 0);
#endif
  }
  // Copies bytes, a multiple of 16, between addresses that are.
  __device__ __forceinline__ void copy(void* smem, const void* gmem, uint32_t bytes) {
#if ENGINE_HAS_CLUSTERS
    bulk_load(smem_address(smem), gmem, bytes, smem_address(&state));
#endif
  }
};

// ---- sm_90 only ---------------------------------------------------------------------------------

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

// Both, without ordering any memory: cheaper, for where no block reads what another one wrote.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile(
      "barrier.cluster.arrive.relaxed;\n"
      "barrier.cluster.wait;" ::
          : "memory");
}

// Sends 16 bytes to the same place in block `rank`, counted on the mbarrier at its place there.
// No fence is needed: a thread that has waited for that mbarrier (mbarrier_wait_cluster) sees them.
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
