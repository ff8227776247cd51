// Tile scheduler of attention_decode_sm90 and mla_decode_sm90. Every warp runs it independently,
// from the sequence lengths alone.
//
// The keys of each sequence are divided into key tiles of kTileKeys. The schedule distributes
// chunks: a chunk is one tile or, with num_splits > 0, one split of a sequence. Chunks are numbered
// 0 to T - 1 across all sequences.
//
// A CTA group is one persistent CTA per key/value head. Its CTAs traverse the same pages, so the
// heads of a page, which are adjacent in memory, are read at the same time. CTA group i of G takes
// chunks i T / G to (i + 1) T / G - 1, regardless of sequence boundaries.
//
//   num_splits = 0   all CTAs have equal work, whatever the lengths; a sequence is split only if
//                    the share of a CTA group ends within it
//   num_splits > 0   a sequence is split by its own length alone and CTA groups take whole splits,
//                    so its result does not depend on the other sequences
//
// Sequences without keys, which pad batches, are distributed separately (for_each_empty). The host
// does not read the lengths, so a captured graph stays valid when they change.
//
// With clusters (ClusterScheduler) a sequence's query tokens may be divided too. Each part counts
// as a sequence of num_queries tokens whose last key is that of its last token.
#pragma once

#include "common/sequence_length.cuh"
#include "common/attention.cuh"

struct DecodeProblem {
  const int* context_lens;
  int64_t max_keys;
  int batch, num_kv_heads, num_queries, group, window;
  int num_splits;
  int token_parts;

  __device__ __forceinline__ int length(int b) const {
    const int later = (token_parts - 1 - b % token_parts) * num_queries;
    return max(sequence_length(context_lens, b / token_parts, max_keys) - later, 0);
  }
  __device__ __forceinline__ RowRule rows(int num_keys) const {
    return RowRule(num_queries, group, num_keys, true, window);
  }
};

// Division of a sequence's keys into tiles. A sequence without keys has no chunks but one tile, so
// that a cluster still writes its zeros.
template <int kTileKeys>
struct SequenceTiles {
  int num_keys;
  int first_tile;  // first tile that contains a key visible to any row
  int num_tiles;   // number of tiles from there to the end
  int tiles_per_chunk;
  int num_chunks;

  __device__ __forceinline__ SequenceTiles(const DecodeProblem& problem, int b)
      : num_keys(problem.length(b)) {
    first_tile = problem.rows(num_keys).first_key(0) / kTileKeys;
    num_tiles = max((num_keys + kTileKeys - 1) / kTileKeys - first_tile, 1);
    tiles_per_chunk = 1;
    num_chunks = num_tiles;
    if (problem.num_splits > 0) {
      tiles_per_chunk = (num_tiles + problem.num_splits - 1) / problem.num_splits;
      num_chunks = (num_tiles + tiles_per_chunk - 1) / tiles_per_chunk;
    }
    if (num_keys == 0) num_chunks = 0;
  }
};

// The split that a work tile computes, and the indices of the splits' partials in scratch memory.
struct SplitOf {
  int index, count;  // index of this split, number of splits
  int first;         // balanced: CTA group of split 0; otherwise: partial index of split 0
  int counter;       // index of the counter of finished splits; balanced: `first`; otherwise: b
  bool is_balanced;

  // Index of a split's partial. If balanced, a CTA group writes at most two: one as the first split
  // of a sequence, and one as a later split of another sequence.
  __device__ __forceinline__ int64_t partial(int split) const {
    return is_balanced ? 2ll * (first + split) + (split == 0) : static_cast<int64_t>(first) + split;
  }
};

// Consecutive key tiles of one sequence, processed between two loads of Q.
struct WorkTile {
  int b, num_keys;
  int first_key;  // first key of the first tile
  int num_tiles;
  SplitOf split;
};

// All lanes of a warp must call the constructor and next() together.
template <int kTileKeys>
class PersistentScheduler {
 public:
  using Tiles = SequenceTiles<kTileKeys>;
  static constexpr bool kIsCluster = false;

  __device__ __forceinline__ explicit PersistentScheduler(const DecodeProblem& problem) {
    const int lane_idx = threadIdx.x % kWarpSize;
    int chunks = 0;
    for (int b = lane_idx; b < problem.batch; b += kWarpSize)
      chunks += Tiles(problem, b).num_chunks;
    num_chunks_ = __reduce_add_sync(kFullMask, chunks);
    const int cta_group = blockIdx.x / problem.num_kv_heads;
    if (cta_group >= num_cta_groups(problem)) return;
    chunk_ = first_chunk_of(cta_group, problem);
    end_ = first_chunk_of(cta_group + 1, problem);
    find_sequence(problem, lane_idx);
  }

  // Returns false if no work is left.
  __device__ __forceinline__ bool next(const DecodeProblem& problem, WorkTile& work) {
    if (chunk_ >= end_) return false;
    Tiles tiles(problem, b_);
    while (tiles.num_chunks == 0 && b_ + 1 < problem.batch) tiles = Tiles(problem, ++b_);
    const int chunk = chunk_ - sequence_begin_;
    const bool is_balanced = problem.num_splits == 0;
    const int taken = is_balanced ? min(tiles.num_chunks - chunk, end_ - chunk_) : 1;
    const int tile = chunk * tiles.tiles_per_chunk;
    work.b = b_;
    work.num_keys = tiles.num_keys;
    work.first_key = (tiles.first_tile + tile) * kTileKeys;
    work.num_tiles = min(taken * tiles.tiles_per_chunk, tiles.num_tiles - tile);
    work.split = SplitOf{chunk, tiles.num_chunks, sequence_begin_, b_, is_balanced};
    if (is_balanced) {
      const int cta_group = blockIdx.x / problem.num_kv_heads;
      const bool is_whole = taken == tiles.num_chunks;
      const int first = is_whole ? cta_group : cta_group_of(sequence_begin_, problem);
      const int last =
          is_whole ? cta_group : cta_group_of(sequence_begin_ + tiles.num_chunks - 1, problem);
      work.split = SplitOf{cta_group - first, last - first + 1, first, first, true};
    }
    chunk_ += taken;
    if (chunk + taken == tiles.num_chunks) {
      sequence_begin_ = chunk_;
      ++b_;
    }
    return true;
  }

 private:
  int num_chunks_;                  // number of chunks in the batch
  int chunk_ = 0, end_ = 0;         // remaining chunks of this CTA group
  int b_ = 0, sequence_begin_ = 0;  // sequence that contains chunk_, and its first chunk

  __device__ __forceinline__ int num_cta_groups(const DecodeProblem& problem) const {
    return min(num_chunks_, static_cast<int>(gridDim.x) / problem.num_kv_heads);
  }
  __device__ __forceinline__ int first_chunk_of(int cta_group, const DecodeProblem& problem) const {
    return static_cast<int>(static_cast<int64_t>(cta_group) * num_chunks_ /
                            num_cta_groups(problem));
  }
  __device__ __forceinline__ int cta_group_of(int chunk, const DecodeProblem& problem) const {
    return static_cast<int>((static_cast<int64_t>(chunk + 1) * num_cta_groups(problem) - 1) /
                            num_chunks_);
  }

  // Finds the sequence that contains chunk_: 32 sequences at a time, then by a prefix sum over the
  // lanes.
  __device__ __forceinline__ void find_sequence(const DecodeProblem& problem, int lane_idx) {
    sequence_begin_ = 0;
    for (b_ = 0; b_ + kWarpSize < problem.batch; b_ += kWarpSize) {
      const int all = __reduce_add_sync(kFullMask, Tiles(problem, b_ + lane_idx).num_chunks);
      if (sequence_begin_ + all > chunk_) break;
      sequence_begin_ += all;
    }
    const int chunks = b_ + lane_idx < problem.batch ? Tiles(problem, b_ + lane_idx).num_chunks : 0;
    int prefix = chunks;  // inclusive
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, prefix, offset);
      if (lane_idx >= offset) prefix += other;
    }
    const int skipped = __popc(__ballot_sync(kFullMask, sequence_begin_ + prefix <= chunk_));
    sequence_begin_ += __shfl_sync(kFullMask, prefix - chunks, skipped);
    b_ += skipped;
  }
};

// Calls `each(b)` for this CTA group's share of the sequences without keys. All lanes of a warp
// must call it together.
template <typename Each>
__device__ __forceinline__ void for_each_empty(const DecodeProblem& problem, Each each) {
  const int cta_group = blockIdx.x / problem.num_kv_heads;
  const int num_cta_groups = gridDim.x / problem.num_kv_heads;
#pragma unroll 1
  for (int first = cta_group; first < problem.batch; first += kWarpSize * num_cta_groups) {
    const int b = first + threadIdx.x % kWarpSize * num_cta_groups;
    const bool is_empty = b < problem.batch && problem.length(b) == 0;
    unsigned found = __ballot_sync(kFullMask, is_empty);
#pragma unroll 1
    for (; found != 0; found &= found - 1) each(first + (__ffs(found) - 1) * num_cta_groups);
  }
}

// For few sequences: a cluster's CTAs split one sequence and head, by its length alone.
template <int kTileKeys, int kCluster>
class ClusterScheduler {
 public:
  static constexpr bool kIsCluster = true;

  __device__ __forceinline__ explicit ClusterScheduler(const DecodeProblem&) {}

  __device__ __forceinline__ static int sequence(const DecodeProblem& problem) {
    return blockIdx.x / kCluster / problem.num_kv_heads;
  }

  // Returns true once, possibly for a work tile without key tiles.
  __device__ __forceinline__ bool next(const DecodeProblem& problem, WorkTile& work) {
    if (is_done_) return false;
    is_done_ = true;
    const int b = sequence(problem), rank = blockIdx.x % kCluster;
    const SequenceTiles<kTileKeys> tiles(problem, b);
    const int begin = rank * tiles.num_tiles / kCluster;
    const int end = (rank + 1) * tiles.num_tiles / kCluster;
    work = WorkTile{b, tiles.num_keys, (tiles.first_tile + begin) * kTileKeys, end - begin, {}};
    return true;
  }

 private:
  bool is_done_ = false;
};

template <int kTileKeys, int kCluster>
struct SchedulerOf {
  using Type = ClusterScheduler<kTileKeys, kCluster>;
};
template <int kTileKeys>
struct SchedulerOf<kTileKeys, 1> {
  using Type = PersistentScheduler<kTileKeys>;
};
