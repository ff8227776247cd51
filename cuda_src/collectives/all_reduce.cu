// All-reduce: every rank of a group receives the sum of the ranks' arrays.
//
//   x, out  (n,) scalar_t   contiguous; out may alias x
//   group   PeerGroup of this rank (peer_memory.cuh)
//   is_aligned              x and out are aligned to 16 bytes
//   num_sent                first vectors of x that the preceding product has sent
//                           (gemm/gemm_sender_sm90.cuh)
//
// All ranks must launch it with the same n. One-shot: each rank sends its array to all others, and
// every rank sums all arrays. Two-shot (reduce-scatter, then all-gather): rank r receives and sums
// the r-th segment of every array, then sends the result to all others.
//
// Numerics: summed in float in rank order, starting from +0, and rounded once. Both variants
// produce the same bits in all ranks.
// Parallelisation: each thread handles one or more 16-byte vectors. A thread sends its next vector
// before it waits for the current one. It waits only for data sent by threads with the same index
// in other ranks, so no block waits for a block of its own rank.
// Mirror: engine/reference/all_reduce.py
#include "common/peer_memory.cuh"

constexpr int kOp = 1;  // op id, named in engine/kernels/_peer_memory.py
constexpr int kMaxThreads = 512;

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    all_reduce_one_shot(const scalar_t* x, scalar_t* out, PeerGroup* group, int64_t n,
                        int is_aligned) {
  pdl_trigger();
  PeerCall call(group, kOp);
  pdl_wait();
  const int length = num_vectors(n);
  const int step = gridDim.x * blockDim.x;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  Words own = {};
  call.begin();
  if (i < length) own = load_flat(x, i, n, is_aligned);
  if (i < length) call.push_to_all(0, length, i, own);
  call.advance(static_cast<uint32_t>((call.size - 1) * length));
  call.empty_previous();
  for (; i < length; i += step) {
    Words next = {};
    if (i + step < length) {
      next = load_flat(x, i + step, n, is_aligned);
      call.push_to_all(0, length, i + step, next);
    }
    store_flat(out, i, n, is_aligned, sum_over_ranks<4>(call, length, i, own));
    own = next;
  }
}

// One-shot for large x of which a part has been sent. A thread sends another vector of the rest
// before it sums one; first come the vectors sent last, which may still be in L2.
extern "C" __global__ void __launch_bounds__(kMaxThreads)
    all_reduce_sent(const scalar_t* x, scalar_t* out, PeerGroup* group, int64_t n, int is_aligned,
                    int num_sent) {
  pdl_trigger();
  PeerCall call(group, kOp);
  pdl_wait();
  call.begin();
  const int length = num_vectors(n);
  const int step = gridDim.x * blockDim.x;
  const int begin = blockIdx.x * blockDim.x + threadIdx.x;
  call.advance(static_cast<uint32_t>((call.size - 1) * length));
  call.empty_previous();
  int unsent = first_unsent(begin, step, num_sent);
  for (int turn = begin; turn < length; turn += step) {
    if (unsent < length) call.push_to_all(0, length, unsent, load_flat(x, unsent, n, is_aligned));
    unsent += step;
    // SAFETY: out may alias x: this thread has sent vector i, in this turn or before.
    const int i = turn < num_sent ? num_sent - 1 - turn : turn;
    const Words own = load_flat(x, i, n, is_aligned);
    store_flat(out, i, n, is_aligned, sum_over_ranks<2>(call, length, i, own));
  }
}

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    all_reduce_two_shot(const scalar_t* x, scalar_t* out, PeerGroup* group, int64_t n,
                        int is_aligned, int num_sent) {
  pdl_trigger();
  PeerCall call(group, kOp);
  pdl_wait();
  call.begin();
  const int total = num_vectors(n);
  const int length = (total + call.size - 1) / call.size;  // vectors per segment
  const int sums = (call.size - 1) * length;               // buffer offset of the sums
  const int step = gridDim.x * blockDim.x;
  const int begin = blockIdx.x * blockDim.x + threadIdx.x;
  for (int j = begin; j < length; j += step) {
    for (int p = 0; p < call.size; ++p) {
      const int i = p * length + j;
      if (p != call.rank && i >= num_sent && i < total)
        call.push(p, 0, length, j, load_flat(x, i, n, is_aligned));
    }
  }
  call.advance(static_cast<uint32_t>(2 * sums));
  call.empty_previous();
  for (int j = begin; j < length; j += step) {
    const int i = call.rank * length + j;
    if (i >= total) break;
    const Words sum = sum_over_ranks<4>(call, length, j, load_flat(x, i, n, is_aligned));
    call.push_to_all(sums, length, j, sum);
    store_flat(out, i, n, is_aligned, sum);
  }
  // SAFETY: out may alias x: the thread that overwrites a vector has sent it in the first loop.
  for (int j = begin; j < length; j += step) {
    for (int p = 0; p < call.size; ++p) {
      const int i = p * length + j;
      if (p == call.rank || i >= total) continue;
      const Words* source = call.source(p, sums, length, j);
      store_flat(out, i, n, is_aligned, call.wait(source, p, load_peer_words(source)));
    }
  }
}
