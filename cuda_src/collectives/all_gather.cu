// All-gather of rows: every rank receives out[r] = [x_0[r] | x_1[r] | ...].
//
//   x      (M, N) scalar_t          contiguous
//   out    (M, size * N) scalar_t   contiguous
//   group  PeerGroup of this rank (peer_memory.cuh)
//   is_aligned                      rows of both arrays consist of whole 16-byte vectors
//
// All ranks must launch it with the same M and N.
//
// Numerics: values are copied unchanged, except that -0 may arrive as +0.
// Parallelisation: each thread handles one or more 16-byte vectors. A thread waits only for data
// sent by threads with the same index in other ranks.
// Mirror: engine/reference/all_gather.py
#include "common/peer_memory.cuh"

constexpr int kOp = 3;  // op id, named in engine/kernels/_peer_memory.py
constexpr int kMaxThreads = 512;

// Stores vector i of rank `from`'s (M, N) array to its columns of `out`.
__device__ __forceinline__ void store_gathered(scalar_t* out, int i, unsigned total, unsigned n,
                                               int size, int from, bool is_aligned,
                                               const Words& x) {
  const Vec<scalar_t, kVec> values = unpack<kVec>(x);
  if (is_aligned) {
    const unsigned length = n / kVec, row = static_cast<unsigned>(i) / length;
    const int64_t vector = (static_cast<int64_t>(row) * size + from) * length + (i - row * length);
    store_vec(out + vector * kVec, values);
    return;
  }
  const unsigned begin = static_cast<unsigned>(i) * kVec;
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    if (begin + j >= total) break;
    const unsigned row = (begin + j) / n;
    out[(static_cast<int64_t>(row) * size + from) * n + (begin + j - row * n)] = values.v[j];
  }
}

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    all_gather_rows(const scalar_t* x, scalar_t* out, PeerGroup* group, int64_t num_rows, int n,
                    int is_aligned) {
  pdl_trigger();
  PeerCall call(group, kOp);
  pdl_wait();
  const unsigned total = static_cast<unsigned>(num_rows) * n;
  const int length = num_vectors(total);
  const int step = gridDim.x * blockDim.x;
  const int begin = blockIdx.x * blockDim.x + threadIdx.x;
  call.begin();
  for (int i = begin; i < length; i += step) {
    const Words own = load_flat(x, i, total, is_aligned);
    call.push_to_all(0, length, i, own);
    store_gathered(out, i, total, n, call.size, call.rank, is_aligned, own);
  }
  call.advance(static_cast<uint32_t>((call.size - 1) * length));
  call.empty_previous();
  for (int i = begin; i < length; i += step) {
    for (int p = 0; p < call.size; ++p) {
      if (p == call.rank) continue;
      const Words* source = call.source(p, 0, length, i);
      const Words part = call.wait(source, p, load_peer_words(source));
      store_gathered(out, i, total, n, call.size, p, is_aligned, part);
    }
  }
}
