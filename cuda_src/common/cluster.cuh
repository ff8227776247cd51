// What portable kernels use of sm_90: thread block clusters (blocks that read each other's shared
// memory) and bulk copies. On older chips a cluster is one block.
#pragma once

#include "common/cp_async.cuh"
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

// Which cluster this block is of, along the grid's first axis, and how many there are.
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
// A block that is alone pays no more than for __syncthreads().
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

// Four floats of the shared memory of block `rank` of the cluster, at the place `p` has in this one's.
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

// An mbarrier that counts the bytes of bulk copies; one thread arrives. Used for one phase only.
struct BulkBarrier {
  uint64_t state;

  // By one thread; a __syncthreads() must follow before others use it.
  __device__ __forceinline__ void init() {
#if ENGINE_HAS_CLUSTERS
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;\n" ::"r"(
            smem_address(&state))
        : "memory");
#endif
  }
  // By one thread, before or after the copies are issued.
  __device__ __forceinline__ void expect(uint32_t bytes) {
#if ENGINE_HAS_CLUSTERS
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(smem_address(&state)),
        "r"(bytes)
        : "memory");
#endif
  }
  __device__ __forceinline__ void wait() {
#if ENGINE_HAS_CLUSTERS
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra again;\n}\n" ::"r"(
            smem_address(&state))
        : "memory");
#endif
  }
  // Copies bytes, a multiple of 16, between addresses that are.
  __device__ __forceinline__ void copy(void* smem, const void* gmem, uint32_t bytes) {
#if ENGINE_HAS_CLUSTERS
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(smem_address(smem)),
        "l"(gmem), "r"(bytes), "r"(smem_address(&state))
        : "memory");
#endif
  }
};
