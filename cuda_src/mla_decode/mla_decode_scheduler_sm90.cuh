// Work tiles of mla_decode_sm90: which keys of which sequence a CTA group processes.
//
// As common/decode_scheduler.cuh describes, with two differences. All CTA groups take the same
// number of chunks: if rounding it up to a multiple of the longest sequence costs at most
// `split_cost` key tiles, it is rounded, since to write and combine the partials of split sequences
// would cost more. And lane i holds the length of sequence window + i, so the next work tile is
// found without reading memory.
#pragma once

#include "common/decode_scheduler.cuh"
#include "mla_decode/mla_decode_config_sm90.cuh"

class Scheduler {
 public:
  // All lanes of a warp must call the functions together.
  __device__ __forceinline__ explicit Scheduler(const MlaDecodeSm90Params& p) : p_(p) {
    int total = 0, longest = 0;
    for (int first = p.batch - 1 & ~(kWarpSize - 1); first >= 0; first -= kWarpSize) {
      load(first);
      total += chunks_;
      longest = ::max(longest, chunks_);
    }
    total = __reduce_add_sync(kFullMask, total);
    longest = __reduce_max_sync(kFullMask, longest);
    share_ = ceil_div(total, static_cast<int>(gridDim.x) / p.row_tiles);
    if (p.num_splits == 0 && longest > 0) {
      const int whole = ceil_div(share_, longest) * longest;
      if (whole - share_ <= p.split_cost) share_ = whole;
    }
    chunk_ = min(group() * share_, total);
    end_ = min(chunk_ + share_, total);
    find_sequence();
  }

  // Returns false if no work is left.
  __device__ __forceinline__ bool next(WorkTile& work) {
    if (chunk_ >= end_) return false;
    int chunks = 0;
    for (;; ++b_) {
      if (b_ - window_ == kWarpSize) load(b_);
      chunks = __shfl_sync(kFullMask, chunks_, b_ - window_);
      if (chunks > 0) break;
    }
    const bool is_balanced = p_.num_splits == 0;
    const int chunk = chunk_ - begin_;
    const int taken = is_balanced ? min(chunks - chunk, end_ - chunk_) : 1;
    work.b = b_;
    work.num_keys = __shfl_sync(kFullMask, num_keys_, b_ - window_);
    const int num_tiles = tiles_of(work.num_keys), size = tiles_per_chunk(num_tiles);
    work.first_key = chunk * size * kKeys;
    work.num_tiles = min(taken * size, num_tiles - chunk * size);
    work.split = SplitOf{chunk, chunks, begin_, b_, is_balanced};
    if (is_balanced) {
      const bool is_whole = taken == chunks;
      const int first = is_whole ? group() : begin_ / share_;
      const int last = is_whole ? group() : (begin_ + chunks - 1) / share_;
      work.split = SplitOf{group() - first, last - first + 1, first, first, true};
    }
    chunk_ += taken;
    if (chunk + taken == chunks) {
      begin_ = chunk_;
      ++b_;
    }
    return true;
  }

 private:
  const MlaDecodeSm90Params& p_;
  int share_;                  // chunks per CTA group
  int chunk_, end_;            // remaining chunks of this CTA group
  int b_ = 0, begin_ = 0;      // sequence that contains chunk_, and its first chunk
  int window_;                 // lane i holds sequence window_ + i
  int num_keys_, chunks_ = 0;  // of the lane's sequence

  __device__ __forceinline__ static int ceil_div(int a, int b) { return (a + b - 1) / b; }
  __device__ __forceinline__ static int tiles_of(int num_keys) {
    return (num_keys + kKeys - 1) / kKeys;
  }
  __device__ __forceinline__ int group() const { return blockIdx.x / p_.row_tiles; }
  __device__ __forceinline__ int tiles_per_chunk(int num_tiles) const {
    return p_.num_splits == 0 ? 1 : ceil_div(num_tiles, p_.num_splits);
  }

  __device__ __forceinline__ void load(int window) {
    window_ = window;
    const int b = window + threadIdx.x % kWarpSize;
    num_keys_ = b < p_.batch ? sequence_length(p_.context_lens, b, p_.max_keys) : 0;
    const int num_tiles = tiles_of(num_keys_);
    chunks_ = num_tiles == 0 ? 0 : ceil_div(num_tiles, tiles_per_chunk(num_tiles));
  }

  // Finds the sequence that contains chunk_: by windows, then by a prefix sum over the lanes.
  __device__ __forceinline__ void find_sequence() {
    for (;;) {
      const int sum = __reduce_add_sync(kFullMask, chunks_);
      if (begin_ + sum > chunk_ || window_ + kWarpSize >= p_.batch) break;
      begin_ += sum;
      load(window_ + kWarpSize);
    }
    int prefix = chunks_;  // inclusive
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, prefix, offset);
      if (threadIdx.x % kWarpSize >= offset) prefix += other;
    }
    const int skipped = __popc(__ballot_sync(kFullMask, begin_ + prefix <= chunk_));
    begin_ += __shfl_sync(kFullMask, prefix - chunks_, skipped % kWarpSize);
    b_ = window_ + skipped;
  }
};
