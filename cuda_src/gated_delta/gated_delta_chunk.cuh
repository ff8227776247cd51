// Chunks of 64 tokens: which tokens they hold, and the scratch that passes them between kernels.
//
// With rows as tokens, c = cumsum(g) in the chunk, D[i][j] = e^(c_i - c_j) for i >= j and 0 beyond,
// q and k normalised, and S^T the state before the chunk (the papers' S):
//
//   A = strictly lower part of diag(beta) K K^T * D     T = (I + A)^-1 diag(beta)
//   X = T (V - diag(e^c) K S^T)                         (the updates u of all tokens)
//   out = diag(e^c) Q S^T + (Q K^T * D) X
//   S = e^(c_last) S + X^T diag(e^(c_last - c)) K
//
// T and Q K^T * D do not depend on the chunk before: the prepare kernel computes them for all
// chunks at once, the scan kernel walks the chunks of a sequence. q and k stay as they are: the
// reciprocals of their norms are factors of rows, applied to float sums.
#pragma once

#include "common/sequence_chunks.cuh"
#include "gated_delta/gated_delta_problem.cuh"

constexpr int kKeyDim = KEY_DIM, kValueDim = VALUE_DIM;
static_assert(kKeyDim % 16 == 0 && kValueDim % 32 == 0, "tiles of the products");

// With a gate per channel c has a column per feature of k: D becomes part of the products over
// channels, and e^c and e^(c_last - c) scale q and k instead of rows, so the prepare kernel leaves
// scaled copies of them.

// What the prepare kernel leaves for one chunk of one head.
struct ChunkScratch {
  static constexpr int kScaled = kHasChannelGate ? kChunkTokens * kKeyDim : 0;
  static constexpr int kRows = kHasChannelGate ? 0 : kChunkTokens;
  static constexpr int kDecays = kHasChannelGate ? kKeyDim : 4;  // 4: the next chunk is aligned
  static constexpr int kHalves = 2 * kChunkTokens * kChunkTokens + 3 * kScaled;
  // The factors: q_rows, k_rows, x_rows and decay, one after the other.
  static constexpr int kKeyRows = kRows, kXRows = 2 * kRows, kDecay = 3 * kRows;
  static constexpr int kFactors = 3 * kRows + kDecays;
  static constexpr int kFloats = kHalves / 2 + kFactors;

  // Lower triangular matrices (64, 64), of which blocks of 16 x 16 above the diagonal stay unset.
  scalar_t* inverse;  // T
  scalar_t* reads;    // Q K^T * D, scaled
  // (64, dk), with a gate per channel: diag(e^c) Q, scaled; diag(e^c) K; diag(e^(c_last - c)) K.
  scalar_t *q, *k_reads, *k_writes;
  // Factors. With a gate per head: of rows of Q S^T, of K S^T, and of X in the update of S, (64,)
  // each; e^(c_last) (1,). With a gate per channel: e^(c_last) (dk,).
  float* factors;

  __device__ __forceinline__ ChunkScratch(const GatedDeltaParams& p, int chunk, int head) {
    const int64_t index = static_cast<int64_t>(chunk - p.first_chunk) * p.num_heads + head;
    float* const floats = p.scratch + index * kFloats;
    inverse = reinterpret_cast<scalar_t*>(floats);
    reads = inverse + kChunkTokens * kChunkTokens;
    q = reads + kChunkTokens * kChunkTokens;
    k_reads = q + kScaled;
    k_writes = k_reads + kScaled;
    factors = floats + kHalves / 2;
  }
};

// A head's state, in float, of the sequence whose chunks two launches share: what launch number
// `launch` leaves for the next. Alternating between two buffers, a launch never writes what it
// reads.
__device__ __forceinline__ float* carried_state(const GatedDeltaParams& p, int launch, int head) {
  float* const carried =
      p.scratch + static_cast<int64_t>(p.max_chunks) * p.num_heads * ChunkScratch::kFloats;
  return carried + (static_cast<int64_t>(launch % 2) * p.num_heads + head) * kValueDim * kKeyDim;
}

// A sequence's chunks, and those of them, [begin, end), that belong to the launch.
//
// Their ids begin at sequence.begin / 64 + 2 b. A sequence has at most two chunks more than its
// tokens fill, so ids of sequences do not overlap, and no kernel sums over earlier sequences.
struct ChunkRange : SequenceChunks {
  int first_id, num_chunks, begin, end;

  __device__ __forceinline__ ChunkRange(const GatedDeltaParams& p, const Sequence& sequence, int b)
      : SequenceChunks(p, sequence, b) {
    first_id = sequence.begin / kChunkTokens + 2 * b;
    num_chunks = sequence.num_tokens() > p.max_steps ? count() : 0;
    begin = max(p.first_chunk - first_id, 0);
    end = min(p.first_chunk + p.num_chunks - first_id, num_chunks);
  }
};
