// Chunks of 64 tokens: what a block computes for them, and what it keeps in shared memory.
//
// With rows as tokens, c = cumsum(-step e^a_log) in the chunk, and S the state before it, (P, N):
//
//   M[i][j] = (c_i . b_j) step_j e^(c_i - c_j) for i >= j, 0 beyond
//   out = diag(e^c) C S^T + M X + d X
//   S = e^(c_last) S + X^T diag(step e^(c_last - c)) B
//
// Only the products with S depend on the chunk before. So a block's producer warps copy the chunks
// to come and compute M of the next one, while its consumer warps, which hold the state in their
// accumulators, compute the output of this one and update the state.
#pragma once

#include "common/mma_operands.cuh"
#include "common/sequence_chunks.cuh"
#include "mamba2/mamba2_problem.cuh"

// Of a block: kHeads heads of one group, and kRows rows of each head's state, which are features
// of x. A consumer warp owns 16 kTiles of these rows.
constexpr int kStateSize = STATE_SIZE, kHeads = HEADS, kRows = ROWS, kTiles = TILES;
static_assert(kStateSize % 16 == 0 && kRows % (16 * kTiles) == 0, "tiles of the products");

constexpr int kProducerWarps = kChunkTokens / 16;  // one per 16 rows of M
constexpr int kProducerThreads = kProducerWarps * kWarpSize;
constexpr int kWarpRows = 16 * kTiles;
constexpr int kHeadWarps = kRows / kWarpRows;  // consumers
constexpr int kThreads = kProducerThreads + kHeads * kHeadWarps * kWarpSize;

// Rows of shared memory are 16 bytes longer, so that ldmatrix meets no bank twice.
constexpr int kPad = 8;
constexpr int kStatePitch = kStateSize + kPad, kRowPitch = kRows + kPad;
constexpr int kTokenPitch = kChunkTokens + kPad;

// A chunk's operands.
struct ChunkStage {
  scalar_t b[kChunkTokens * kStatePitch], c[kChunkTokens * kStatePitch];
  scalar_t x[kHeads][kChunkTokens * kRowPitch];
};

// Factors of a chunk's tokens for a head. With c in log2 units: c; step; e^c; step e^(c_last - c).
struct ChunkFactors {
  float log_decay[kChunkTokens], step[kChunkTokens], read[kChunkTokens], write[kChunkTokens];
};

template <int kStages>
struct ChunkShared {
  ChunkStage stages[kStages];
  scalar_t mix[2][kHeads][kChunkTokens * kTokenPitch];  // M; columns up to the row's block of 16
  ChunkFactors factors[3][kHeads];
};

// A block's place in the problem.
struct ChunkBlock {
  const Mamba2Params& p;
  const Sequence sequence;
  const SequenceChunks chunks;
  const int head, row;  // the first of its heads, and of its rows of their states
};
