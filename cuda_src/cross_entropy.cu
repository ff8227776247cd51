// Cross-entropy of rows of logits, and its gradient, from one read of the logits.
//
//   x    = logits, or softcap * tanh(logits / softcap)
//   lse  = log(sum_i exp(x_i))
//   loss = (1 - smoothing) * (lse - x_target) + smoothing * (lse - mean(x)) + z_loss * lse^2
//   dlogits_i = dloss * ((1 + 2 z_loss lse) exp(x_i - lse) - smoothing / V
//                        - (1 - smoothing) [i = target]) * (1 - (x_i / softcap)^2)
//
// Arguments: CrossEntropyParams, below.
//
// Numerics: float. Each thread keeps a running maximum m and a sum of exp(x - m); maxima and sums
// are combined in a fixed order. loss = log(sum) + (m - x_target), which does not cancel where the
// loss is small. The gradient is rounded once.
// Parallelisation: one CTA per row or, with a gradient, a cluster of 1 to 8, chosen by the row's
// bytes alone, so a row's result does not depend on the number of rows. With a gradient, a CTA's
// share of the row is copied to shared memory (cp.async, all of it in flight at once) and stays
// there; a thread reads back only what it copied. What does not fit is read from global memory a
// second time. A row of an ignored target is not read.
// Mirror: engine/reference/cross_entropy.py
#include "common/cluster.cuh"
#include "common/cp_async.cuh"
#include "common/exp2.cuh"
#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

constexpr int kStages = 4;  // parts of the shared-memory copy, each with its own wait
constexpr int kMaxCluster = 8;

struct CrossEntropyParams {
  const scalar_t* logits;  // (N, V), rows logits_stride elements apart
  int64_t logits_stride;
  const void* target;  // (N,) int64_t if wide_target, else int
  int wide_target;
  int64_t ignore_index;
  const float* dloss;  // (N,) or (1,): dloss_stride 1 or 0; null: no gradient
  int dloss_stride;
  float* loss;        // (N,); 0 if ignored, NaN for a target outside [0, V)
  float* lse;         // (N,); 0 if ignored
  scalar_t* dlogits;  // (N, V), rows dlogits_stride apart; may be logits; null without dloss
  int64_t dlogits_stride;
  int n;             // V
  int max_resident;  // 16-byte vectors of a row that fit in a CTA's shared memory
  float softcap, z_loss, smoothing;
};

// e^x; exactly 1 for 0, so the loss of a row with one large logit is exactly 0.
__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * kLog2E); }

// The softmax of the values seen so far, by one thread or by several.
struct Softmax {
  float largest = -INFINITY;
  float base = 0.0f;   // `largest`, or 0 while that is -inf
  float sum = 0.0f;    // sum of exp(x - base)
  float total = 0.0f;  // sum of x

  template <int kWidth>
  __device__ __forceinline__ void add(const float (&x)[kWidth]) {
    float high = x[0];
#pragma unroll
    for (int j = 1; j < kWidth; ++j) high = fmaxf(high, x[j]);
    if (high > largest) rebase(high);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sum += exp_approx(x[j] - base);
      total += x[j];
    }
  }

  // Makes `high`, at least `largest`, the largest value. With none seen the sum is 0, or NaN.
  __device__ __forceinline__ void rebase(float high) {
    const float next = high == -INFINITY ? 0.0f : high;
    if (largest != -INFINITY) sum *= exp_approx(base - next);
    largest = high;
    base = next;
  }

  __device__ __forceinline__ void merge_warp() {
    rebase(warp_max(largest));
    sum = warp_sum(sum);
    total = warp_sum(total);
  }
};

// x, capped, and the derivative of the cap.
template <bool kSoftcap>
struct Cap {
  float softcap, inverse;

  __device__ __forceinline__ float tanh(float x) const {
    if constexpr (sizeof(scalar_t) == 4) return tanhf(x * inverse);
    // absolute error 3e-7
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2.0f * kLog2E * inverse * x));
  }
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (kSoftcap) return softcap * tanh(x);
    return x;
  }
};

// The gradient of one row: factor * exp(x - base) - uniform, less `hit` at the target.
template <bool kSoftcap>
struct Gradient {
  Cap<kSoftcap> cap;
  float base, factor, uniform, hit;
  int target;

  __device__ __forceinline__ scalar_t operator()(scalar_t logit, int i) const {
    const float t = kSoftcap ? cap.tanh(to_float(logit)) : 0.0f;
    const float x = kSoftcap ? cap.softcap * t : to_float(logit);
    float g = fmaf(exp_approx(x - base), factor, -uniform);
    if (i == target) g -= hit;
    return from_float<scalar_t>(kSoftcap ? g * (1.0f - t * t) : g);
  }
};

// A CTA's share of a row: `count` vectors from element `begin` on, and in the first CTA the `edges`
// elements before the first aligned address and after the last whole vector of the row.
struct Share {
  const scalar_t* x;
  scalar_t* dx;
  int begin, count, resident, head, edges, edge_shift;

  __device__ __forceinline__ Share(const CrossEntropyParams& p, int64_t row, int rank, int size)
      : x(p.logits + row * p.logits_stride),
        dx(p.dlogits == nullptr ? nullptr : p.dlogits + row * p.dlogits_stride) {
    const int past = reinterpret_cast<uint64_t>(x) % kVecBytes / sizeof(scalar_t);
    head = min((kVec - past) % kVec, p.n);
    const int vectors = (p.n - head) / kVec;
    const int each = (vectors + size - 1) / size;
    begin = head + min(rank * each, vectors) * kVec;
    count = max(min(each, vectors - rank * each), 0);
    resident = min(count, p.max_resident);
    edges = rank == 0 ? p.n - vectors * kVec : 0;
    edge_shift = vectors * kVec;
  }
  __device__ __forceinline__ int element(int vector) const { return begin + vector * kVec; }
  // The place in the row of edge element `i`.
  __device__ __forceinline__ int edge(int i) const { return i < head ? i : i + edge_shift; }
};

template <bool kSoftcap>
__device__ __forceinline__ void add_vector(Softmax& softmax, const Packed<kVec>& packed,
                                           const Cap<kSoftcap>& cap) {
  const Vec<scalar_t, kVec> v = unpack<kVec>(packed);
  float x[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) x[j] = cap(to_float(v.v[j]));
  softmax.add(x);
}

// Reads the share, and leaves its resident vectors in shared memory.
template <int kThreads, bool kSoftcap>
__device__ __forceinline__ Softmax read_share(const Share& share, Packed<kVec>* smem_row,
                                              const Cap<kSoftcap>& cap) {
  const int per_stage = (share.resident + kStages - 1) / kStages;
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    const int end = min((s + 1) * per_stage, share.resident);
    for (int i = s * per_stage + threadIdx.x; i < end; i += kThreads)
      cp_async_16(smem_row + i, share.x + share.element(i));
    cp_async_commit();
  }
  Softmax softmax;
  if (threadIdx.x < share.edges) {
    const float x[1] = {cap(to_float(share.x[share.edge(threadIdx.x)]))};
    softmax.add(x);
  }
#pragma unroll 4
  for (int i = share.resident + threadIdx.x; i < share.count; i += kThreads)
    add_vector(softmax, load_packed<kVec>(share.x + share.element(i)), cap);
  const auto add_stage = [&](int s) {
    const int end = min((s + 1) * per_stage, share.resident);
    for (int i = s * per_stage + threadIdx.x; i < end; i += kThreads)
      add_vector(softmax, smem_row[i], cap);
  };
  // SAFETY: a thread reads the vectors that it copied itself, so no barrier is needed.
  cp_async_wait<3>();
  add_stage(0);
  cp_async_wait<2>();
  add_stage(1);
  cp_async_wait<1>();
  add_stage(2);
  cp_async_wait<0>();
  add_stage(3);
  return softmax;
}

// The softmax over all threads of the cluster, in every thread.
template <int kThreads>
__device__ __forceinline__ void merge_cluster(Softmax& softmax, float (*smem_parts)[3], int rank,
                                              int size) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  softmax.merge_warp();
  if constexpr (kHasClusters) {
    if (size > 1) cluster_wait();  // SAFETY: the other CTAs have started, so their memory exists.
  }
  if (lane_idx < size) {
    float* part = smem_parts[rank * kWarps + warp_idx];
    st_shared_cluster(part, lane_idx, size, softmax.largest);
    st_shared_cluster(part + 1, lane_idx, size, softmax.sum);
    st_shared_cluster(part + 2, lane_idx, size, softmax.total);
  }
  cluster_sync(size);  // SAFETY: no CTA touches another's memory after it, so each may exit.
  softmax = Softmax{};
  for (int i = lane_idx; i < size * kWarps; i += kWarpSize) {
    const float high = smem_parts[i][0];
    const float next = fmaxf(softmax.largest, high);
    Softmax part;
    part.largest = high;
    part.base = high == -INFINITY ? 0.0f : high;
    part.sum = smem_parts[i][1];
    part.rebase(next);
    softmax.rebase(next);
    softmax.sum += part.sum;
    softmax.total += smem_parts[i][2];
  }
  softmax.merge_warp();
}

// Writes the share's gradient. Without `is_live` it is 0, whatever the logits hold.
template <int kThreads, bool kSoftcap>
__device__ __forceinline__ void write_share(const Share& share, const Packed<kVec>* smem_row,
                                            const Gradient<kSoftcap>& gradient, bool is_live) {
  const bool is_aligned = reinterpret_cast<uint64_t>(share.dx + share.begin) % kVecBytes == 0;
  const auto write = [&](int i, const Packed<kVec>& packed) {
    Vec<scalar_t, kVec> v = unpack<kVec>(packed);
    const int begin = share.element(i);
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      v.v[j] = is_live ? gradient(v.v[j], begin + j) : from_float<scalar_t>(0.0f);
    if (is_aligned) {
      store_vec(share.dx + begin, v);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) share.dx[begin + j] = v.v[j];
    }
  };
  for (int i = threadIdx.x; i < share.count; i += kThreads) {
    Packed<kVec> packed{};
    if (is_live) {
      packed = i < share.resident ? smem_row[i] : load_packed<kVec>(share.x + share.element(i));
    }
    write(i, packed);
  }
  if (threadIdx.x < share.edges) {
    const int i = share.edge(threadIdx.x);
    share.dx[i] = is_live ? gradient(share.x[i], i) : from_float<scalar_t>(0.0f);
  }
}

__device__ __forceinline__ int64_t target_of(const CrossEntropyParams& p, int64_t row) {
  return p.wide_target != 0 ? static_cast<const int64_t*>(p.target)[row]
                            : static_cast<const int*>(p.target)[row];
}

template <int kThreads, bool kSoftcap>
__device__ __forceinline__ void cross_entropy(const CrossEntropyParams& p) {
  extern __shared__ __align__(kVecBytes) unsigned char smem[];
  __shared__ float smem_parts[kMaxCluster * kThreads / kWarpSize][3];
  pdl_trigger();
  pdl_wait();
  const int size = cluster_size(), rank = cluster_rank();
  const int64_t row = cluster_index();
  const bool has_gradient = p.dlogits != nullptr;
  const bool is_first = rank == 0 && threadIdx.x == 0;
  const Share share(p, row, rank, size);
  Packed<kVec>* smem_row = reinterpret_cast<Packed<kVec>*>(smem);
  const int64_t target = target_of(p, row);
  if (target == p.ignore_index) {  // the same for the whole cluster
    if (is_first) p.loss[row] = p.lse[row] = 0.0f;
    if (has_gradient) write_share<kThreads, kSoftcap>(share, smem_row, {}, false);
    return;
  }
  if constexpr (kHasClusters) {
    if (size > 1) cluster_arrive_relaxed();
  }
  const Cap<kSoftcap> cap{p.softcap, kSoftcap ? 1.0f / p.softcap : 0.0f};
  // SAFETY: read before the cluster's barrier, after which the gradient may overwrite it.
  const bool is_known = target >= 0 && target < p.n;
  const float x_target = is_known ? cap(to_float(share.x[target])) : quiet_nan();
  Softmax softmax = read_share<kThreads>(share, smem_row, cap);
  merge_cluster<kThreads>(softmax, smem_parts, rank, size);

  const float log_sum = logf(softmax.sum);
  const float lse = softmax.largest + log_sum;
  if (is_first) {
    float loss = log_sum + (softmax.largest - x_target);
    if (p.smoothing != 0.0f) {
      const float mean = softmax.total / p.n;
      loss += p.smoothing * (x_target - mean);
    }
    p.loss[row] = loss + p.z_loss * lse * lse;
    p.lse[row] = lse;
  }
  if (!has_gradient) return;
  const float dloss = is_known ? p.dloss[row * p.dloss_stride] : quiet_nan();
  const Gradient<kSoftcap> gradient{cap,
                                    softmax.base,
                                    dloss * (1.0f + 2.0f * p.z_loss * lse) / softmax.sum,
                                    dloss * p.smoothing / p.n,
                                    dloss * (1.0f - p.smoothing),
                                    static_cast<int>(target)};
  write_share<kThreads>(share, smem_row, gradient, true);
}

#define ENGINE_CROSS_ENTROPY(name, threads, blocks, softcap)    \
  extern "C" __global__ void __launch_bounds__(threads, blocks) \
      name(const __grid_constant__ CrossEntropyParams p) {      \
    cross_entropy<threads, softcap>(p);                         \
  }

ENGINE_CROSS_ENTROPY(cross_entropy_32, 32, 32, false)
ENGINE_CROSS_ENTROPY(cross_entropy_128, 128, 8, false)
ENGINE_CROSS_ENTROPY(cross_entropy_256, 256, 4, false)
ENGINE_CROSS_ENTROPY(cross_entropy_softcap_32, 32, 32, true)
ENGINE_CROSS_ENTROPY(cross_entropy_softcap_128, 128, 8, true)
ENGINE_CROSS_ENTROPY(cross_entropy_softcap_256, 256, 4, true)
