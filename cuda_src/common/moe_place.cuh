// Sorting the (token, expert) pairs of many tokens by expert: a stable counting sort, whose first
// half has counted each chunk's pairs per expert. Used by moe_route and moe_sort.
#pragma once

#include "common/moe_route.cuh"
#include "common/pdl.cuh"

constexpr int kPlaceThreads = 512;  // block size; one block per chunk of tokens

// Fills `begins` with the index in `order` of each expert's first pair from this block's chunk.
template <int kPer>
__device__ __forceinline__ void find_begins(const MoeRouteParams& p, int* begins) {
  // With fewer experts than threads, several threads sum parts of an expert's chunks.
  constexpr int kExperts = kPer * kWarpSize;
  constexpr int kOwners = kExperts < kPlaceThreads ? kExperts : kPlaceThreads;
  constexpr int kEntries = kExperts < kPlaceThreads ? kPlaceThreads : kExperts;
  __shared__ int smem_total[kEntries], smem_before[kEntries];
  const int owner = threadIdx.x % kOwners;
  const int chunk = blockIdx.x, num_chunks = gridDim.x;
#pragma unroll
  for (int first = 0; first < kExperts; first += kOwners) {
    const int expert = first + owner;
    int total = 0, before = 0;
    if (expert < p.num_experts) {
#pragma unroll 4
      for (int c = threadIdx.x / kOwners; c < num_chunks; c += kPlaceThreads / kOwners) {
        const int count = p.counts[c * p.num_experts + expert];
        total += count;
        before += c < chunk ? count : 0;
      }
    }
    const int entry = first + threadIdx.x;
    if (entry < kEntries) smem_total[entry] = total, smem_before[entry] = before;
  }
  __syncthreads();
  if (threadIdx.x < kExperts) {  // SAFETY: each thread reads and writes only its own entry.
    int total = smem_total[threadIdx.x], before = smem_before[threadIdx.x];
    for (int i = threadIdx.x + kExperts; i < kPlaceThreads; i += kExperts)
      total += smem_total[i], before += smem_before[i];
    smem_total[threadIdx.x] = total, smem_before[threadIdx.x] = before;
  }
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    int own[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) own[i] = smem_total[threadIdx.x * kPer + i];
    sums_before<kPer>(own);
    if (chunk == 0) store_offsets<kPer>(p, own);
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      begins[threadIdx.x * kPer + i] = own[i] + smem_before[threadIdx.x * kPer + i];
  }
}

// Places a chunk's pairs in `order`, kMaskTokens tokens at a time.
template <int kPer>
__device__ __forceinline__ void route_place(const MoeRouteParams& p) {
  constexpr int kExperts = kPer * kWarpSize;
  __shared__ __align__(16) TokenMasks<kPer> smem_masks;
  __shared__ int smem_begins[kExperts];
  pdl_trigger();
  for (int e = threadIdx.x; e < kExperts; e += kPlaceThreads) smem_masks.clear(e);
  pdl_wait();
  find_begins<kPer>(p, smem_begins);
  __syncthreads();
  const int begin = blockIdx.x * p.chunk_tokens, end = min(p.num_tokens, begin + p.chunk_tokens);
#pragma unroll 1
  for (int first = begin; first < end; first += kMaskTokens) {
    const int num_pairs = min(end - first, kMaskTokens) * p.top_k;  // without shared experts
    const auto pair_of = [&](int i) {
      return static_cast<int>(p.first_pair(first + i / p.top_k)) + i % p.top_k;
    };
    for (int i = threadIdx.x; i < num_pairs; i += kPlaceThreads)
      smem_masks.add(p.experts[pair_of(i)], i / p.top_k);
    __syncthreads();
    for (int i = threadIdx.x; i < num_pairs; i += kPlaceThreads) {
      const int pair = pair_of(i), expert = p.experts[pair];
      p.order[smem_begins[expert] + smem_masks.rank(expert, i / p.top_k)] = pair;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < kExperts; e += kPlaceThreads) {
      smem_begins[e] += smem_masks.count(e);
      smem_masks.clear(e);
    }
    __syncthreads();
  }
}
