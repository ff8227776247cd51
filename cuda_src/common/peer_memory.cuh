// Buffers through which the ranks of a group exchange data, and the protocol of one call.
//
// A rank owns three buffers. In call g every rank writes into its peers' buffers g % 3, reads the
// data that arrive in its own, and empties its buffer (g + 2) % 3, which holds the data of call g -
// 1. The data serve as their own flags: an empty word is kEmpty, and a reader polls its own memory
// until no word of a vector is empty. So each word crosses the link only once, and no fence is
// needed.
//
// SAFETY: rank r writes into rank q's buffer (g + 2) % 3 in call g + 2, and q has emptied it by
// then. To finish call g + 1, r needed words of that call sent by q, or by a rank that had received
// words from q; and q began call g + 1 only after its call g, including the emptying, had ended.
// This requires that all ranks make the same calls in the same order, each on one stream. A product
// just before a call may send words of it (gemm/gemm_sender_sm90.cuh): its rank's preceding call
// has ended.
//
// The call index and the state left by the preceding call are in device memory, so a captured graph
// can be replayed.
//
// A rank that waits longer than the group's time-out records the failure in the group, and the
// missing rank in memory that the host reads. From then on no call waits, and results are NaN.
#pragma once

#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kMaxRanks = 8;
constexpr int kBuffers = 3;
constexpr uint32_t kCalls = 3u << 30;  // the index of the next call restarts here
static_assert(kCalls % kBuffers == 0, "the buffers take turns across a restart, too");
constexpr uint32_t kEmpty = 0x80000000u;  // -0 in float, (+0, -0) in 16-bit types; sent as +0
constexpr uint32_t kNan = 0x7fff7fffu;    // a NaN in every dtype
constexpr int kPollsPerClock = 256;

using Words = Packed<kVec>;  // 16 bytes

// State in a rank's device memory; engine/kernels/_peer_memory.py initialises it.
struct PeerGroup {
  Words* buffers[kMaxRanks];  // each rank's three buffers, one after another
  uint32_t call;              // index of the next call, modulo kCalls
  uint32_t num_arrived;       // number of blocks that have read these fields in the current call
  uint32_t num_used;          // number of vectors that the preceding call wrote to each buffer
  uint32_t has_failed;
  int rank, size;
  int64_t capacity;      // vectors per buffer; a buffer is smaller than 2 GB
  int64_t timeout;       // nanoseconds
  uint32_t* host_error;  // (missing rank + 1, index of the call, op), read by the host
};

__device__ __forceinline__ Words load_peer_words(const Words* p) {
  Words x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.v.v[0]), "=r"(x.v.v[1]), "=r"(x.v.v[2]), "=r"(x.v.v[3])
               : "l"(p)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_peer_words(Words* p, const Words& x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x.v.v[0]),
               "r"(x.v.v[1]), "r"(x.v.v[2]), "r"(x.v.v[3])
               : "memory");
}

__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ bool has_arrived(const Words& x) {
  bool ok = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) ok = ok && x.v.v[i] != kEmpty;
  return ok;
}

__device__ __forceinline__ Words filled_words(uint32_t word) {
  Words x;
#pragma unroll
  for (int i = 0; i < 4; ++i) x.v.v[i] = word;
  return x;
}

// Replaces words that would read as empty: -0 becomes +0.
__device__ __forceinline__ Words sendable(Words x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.v.v[i] = x.v.v[i] == kEmpty ? 0u : x.v.v[i];
  return x;
}

// A thread's view of the current call.
class PeerCall {
 public:
  // May be constructed before pdl_wait(): the fields that it reads do not change.
  __device__ __forceinline__ PeerCall(PeerGroup* group, int op) : group_(group), op_(op) {
    rank = group->rank;
    size = group->size;
    capacity_ = group->capacity;
    own_ = group->buffers[rank];
  }

  // Must be called after pdl_wait().
  __device__ __forceinline__ void begin() {
    const Words line = load_peer_words(reinterpret_cast<const Words*>(&group_->call));
    call_ = line.v.v[0];
    num_used_ = line.v.v[2];
    failed_ = line.v.v[3] != 0;
  }

  // Address at which this rank's data arrive at `peer`. From `base` on, the buffer holds one region
  // of `length` vectors per sender.
  __device__ __forceinline__ Words* target(int peer, int base, int length) const {
    Words* to = group_->buffers[peer] + (call_ % kBuffers) * capacity_;
    return to + base + (rank - (rank > peer)) * length;
  }

  // Sends vector i of this rank's data to `peer`.
  __device__ __forceinline__ void push(int peer, int base, int length, int i,
                                       const Words& x) const {
    store_peer_words(target(peer, base, length) + i, x);
  }

  __device__ __forceinline__ void push_to_all(int base, int length, int i, const Words& x) const {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) push(peer, base, length, i, x);
    }
  }

  // Address at which vector i of `peer`'s data arrives.
  __device__ __forceinline__ const Words* source(int peer, int base, int length, int i) const {
    const Words* own = own_ + (call_ % kBuffers) * capacity_;
    return own + base + (peer - (peer > rank)) * length + i;
  }

  // Advances the group to the next call once every block has read its state. All threads of a block
  // must call it, once. `num_used` is the number of vectors that this call writes to each buffer.
  __device__ __forceinline__ void advance(uint32_t num_used) const {
    __syncthreads();  // SAFETY: every thread has read the group's state.
    if (threadIdx.x != 0) return;
    if (atomicAdd(&group_->num_arrived, 1u) != gridDim.x - 1) return;
    group_->num_arrived = 0;
    group_->num_used = num_used;
    group_->call = call_ + 1 == kCalls ? 0 : call_ + 1;
  }

  // Empties the buffer from which the preceding call read.
  __device__ __forceinline__ void empty_previous() const {
    Words* buffer = own_ + ((call_ + 2) % kBuffers) * capacity_;
    const uint32_t step = gridDim.x * blockDim.x;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < num_used_; i += step)
      store_peer_words(buffer + i, empty());
  }

  // Waits for the vector that `peer` sends to `source`; `x` is the value first read there.
  __device__ __forceinline__ Words wait(const Words* source, int peer, Words x) {
    if (has_arrived(x)) return x;
    return poll(source, peer);
  }

  int rank, size;

 private:
  __device__ __forceinline__ static Words empty() { return filled_words(kEmpty); }

  __device__ __forceinline__ Words poll(const Words* source, int peer) {
    if (failed_) return filled_words(kNan);
    uint64_t start = 0;
    for (int polls = 1;; ++polls) {
      const Words x = load_peer_words(source);
      if (has_arrived(x)) return x;
      if (polls % kPollsPerClock != 0) continue;
      const uint64_t now = clock_ns();
      if (start == 0) start = now;
      if (now - start > static_cast<uint64_t>(group_->timeout) || has_group_failed()) break;
    }
    fail(peer);
    return filled_words(kNan);
  }

  __device__ __forceinline__ bool has_group_failed() const {
    return load_peer_words(reinterpret_cast<const Words*>(&group_->call)).v.v[3] != 0;
  }

  __device__ __forceinline__ void fail(int peer) {
    failed_ = true;
    if (atomicExch(&group_->has_failed, 1u) != 0) return;
    volatile uint32_t* error = group_->host_error;
    error[1] = call_;
    error[2] = op_;
    __threadfence_system();
    error[0] = peer + 1;
  }

  PeerGroup* group_;
  Words* own_;
  int op_;
  uint32_t call_, num_used_;
  bool failed_;
  int64_t capacity_;
};

// Replaces this rank's vectors x[k] by the sums of all ranks' vectors at[k], added in float in rank
// order from +0 and rounded once. Negative at[k] are skipped. The first polls of kInFlight ranks
// are in flight together.
template <int kInFlight, int kCount>
__device__ __forceinline__ void sum_over_ranks(PeerCall& call, int length, const int (&at)[kCount],
                                               Words (&x)[kCount]) {
  float sums[kCount][kVec] = {};
#pragma unroll 1
  for (int first = 0; first < call.size; first += kInFlight) {
    Words parts[kInFlight][kCount];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int p = first + j;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        parts[j][k] = x[k];
        if (p < call.size && p != call.rank && at[k] >= 0) {
          parts[j][k] = load_peer_words(call.source(p, 0, length, at[k]));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int p = first + j;
      if (p >= call.size) break;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (p != call.rank && at[k] >= 0) {
          parts[j][k] = call.wait(call.source(p, 0, length, at[k]), p, parts[j][k]);
        }
        const Vec<scalar_t, kVec> values = unpack<kVec>(parts[j][k]);
#pragma unroll
        for (int v = 0; v < kVec; ++v) sums[k][v] += to_float(values.v[v]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    Vec<scalar_t, kVec> total;
#pragma unroll
    for (int v = 0; v < kVec; ++v) total.v[v] = from_float<scalar_t>(sums[k][v]);
    x[k] = sendable(pack<kVec>(total));
  }
}

// sum_over_ranks for one vector.
template <int kInFlight>
__device__ __forceinline__ Words sum_over_ranks(PeerCall& call, int length, int i,
                                                const Words& own) {
  const int at[1] = {i};
  Words x[1] = {own};
  sum_over_ranks<kInFlight>(call, length, at, x);
  return x[0];
}

// Loads vector i of a contiguous array of n elements, ready to be sent; elements past the end are
// 0.
__device__ __forceinline__ Words load_flat(const scalar_t* x, int i, int64_t n, bool is_aligned) {
  const int64_t begin = static_cast<int64_t>(i) * kVec;
  if (is_aligned && begin + kVec <= n) return sendable(load_packed<kVec>(x + begin));
  Vec<scalar_t, kVec> values;
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    values.v[j] = begin + j < n ? x[begin + j] : from_float<scalar_t>(0.0f);
  }
  return sendable(pack<kVec>(values));
}

__device__ __forceinline__ void store_flat(scalar_t* out, int i, int64_t n, bool is_aligned,
                                           const Words& x) {
  const int64_t begin = static_cast<int64_t>(i) * kVec;
  const Vec<scalar_t, kVec> values = unpack<kVec>(x);
  if (is_aligned && begin + kVec <= n) {
    store_vec(out + begin, values);
    return;
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    if (begin + j < n) out[begin + j] = values.v[j];
  }
}

// Returns the first of begin, begin + step, ... that is at least num_sent.
__device__ __forceinline__ int first_unsent(int begin, int step, int num_sent) {
  return begin + max(0, num_sent - begin + step - 1) / step * step;
}

// Number of vectors that hold n elements; the host keeps it below a buffer's capacity.
__device__ __forceinline__ int num_vectors(int64_t n) {
  return static_cast<int>((n + kVec - 1) / kVec);
}
