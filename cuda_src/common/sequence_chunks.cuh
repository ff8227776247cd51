// Chunks of 64 tokens in which recurrent ops compute long sequences as matrix products.
//
// Chunks end at multiples of 64 in the whole sequence, earlier calls included: so a snapshot at
// such a position is the state after a chunk.
#pragma once

#include "common/state_slots.cuh"

constexpr int kChunkTokens = 64;

// Tokens [begin, end) of a sequence.
struct Chunk {
  int begin, end;

  __device__ __forceinline__ int count() const { return end - begin; }
};

// The chunks of a sequence's new tokens; the first and the last may be short.
class SequenceChunks {
 public:
  template <typename P>
  __device__ __forceinline__ SequenceChunks(const P& p, const Sequence& sequence, int b)
      : num_tokens_(sequence.num_tokens()),
        lead_(max(p.context_lens[b] - num_tokens_, 0) % kChunkTokens) {}

  __device__ __forceinline__ int count() const {
    return (lead_ + num_tokens_ + kChunkTokens - 1) / kChunkTokens;
  }

  __device__ __forceinline__ Chunk chunk(int index) const {
    const int from = index * kChunkTokens - lead_;
    return {max(from, 0), min(from + kChunkTokens, num_tokens_)};
  }

 private:
  int num_tokens_;
  int lead_;  // earlier tokens in the first chunk's stretch of 64
};
