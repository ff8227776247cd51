// Tile scheduler of attention_decode_sm90 and mla_decode_sm90. Every warp runs it independently,
// from the sequence lengths alone.
//
// The keys of each sequence are divided into key tiles of kTileKeys. The schedule distributes
// chunks: a chunk is one tile or, with num_splits > 0, one split of a sequence. Chunks are numbered
// 0 to T - 1 across all sequences.
//
// A CTA group is one persistent CTA per key/value head (mla_decode_sm90: per row tile). Its CTAs
// traverse the same pages, so the heads of a page, which are adjacent in memory, are read at the
// same time. CTA group i, which is row i of the grid, takes the i-th share of the chunks.
//
//   num_splits = 0   shares differ by at most one chunk; a sequence is split only if a share ends
//                    within it. If all sequences with keys have the same number of chunks, shares
//                    are rounded up by at most `split_cost` chunks, and at most half, such that all
//                    sequences are whole or split alike: writing and combining partials would cost
//                    more. The last CTA groups may then have no work
//   num_splits > 0   a sequence is split by its own length alone and CTA groups take whole splits,
//                    so its result does not depend on the other sequences
//
// Sequences without keys, which pad batches, are distributed separately (EmptySequences). The host
// does not read the lengths, so a captured graph stays valid when they change.
//
// With clusters (ClusterScheduler) a row of the grid has one sequence. Its query tokens may be
// divided too: each part counts as a sequence of num_queries tokens whose last key is that of its
// last token.
#pragma once

#include "common/sequence_length.cuh"
#include "common/attention.cuh"

struct DecodeProblem {
  const int* context_lens;
  int64_t max_keys;
  int batch;
  int num_queries, group, window;
  int num_splits, split_cost;
  int token_parts;
  bool is_causal;  // see RowRule; false for a single token spares the division in last_key()

  __device__ __forceinline__ int length(int b) const {
    const int later = (token_parts - 1 - b % token_parts) * num_queries;
    return max(sequence_length(context_lens, b / token_parts, max_keys) - later, 0);
  }
  __device__ __forceinline__ RowRule rows(int num_keys) const {
    return RowRule(num_queries, group, num_keys, is_causal, window);
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
  int index, count;  // index of this split, and number of splits; if 1, the rest is unused
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
    const int lane_batch = ceil_div(problem.batch, kWarpSize);  // number of sequences per lane
    const int first = lane_idx * lane_batch, last = min(first + lane_batch, problem.batch);
    int chunks = 0, sequences = 0, longest = 0;
#pragma unroll 4
    for (int b = first; b < last; ++b) {
      const int own = Tiles(problem, b).num_chunks;
      chunks += own;
      sequences += own > 0;
      longest = max(longest, own);
    }
    const int prefix = inclusive_sum(chunks, lane_idx);
    const int total = __shfl_sync(kFullMask, prefix, kWarpSize - 1);
    longest = __reduce_max_sync(kFullMask, longest);
    share_ = total / static_cast<int>(gridDim.y);
    num_larger_ = total - share_ * static_cast<int>(gridDim.y);
    if (problem.num_splits == 0 && total > 0 &&
        total == __reduce_add_sync(kFullMask, sequences) * longest)
      round_share(problem, longest, lane_idx);
    const int own = blockIdx.y;
    chunk_ = own * share_ + min(own, num_larger_);
    end_ = min(chunk_ + share_ + (own < num_larger_), total);
    if (chunk_ >= end_) return;
    const int owner = __popc(__ballot_sync(kFullMask, prefix <= chunk_));
    b_ = owner * lane_batch;
    begin_ = __shfl_sync(kFullMask, prefix - chunks, owner);
    if (lane_batch > 1) find_sequence(problem, lane_idx);
  }

  // Returns false if no work is left.
  __device__ __forceinline__ bool next(const DecodeProblem& problem, WorkTile& work) {
    if (chunk_ >= end_) return false;
    Tiles tiles(problem, b_);
    while (tiles.num_chunks == 0 && b_ + 1 < problem.batch) tiles = Tiles(problem, ++b_);
    const int chunk = chunk_ - begin_;
    const bool is_balanced = problem.num_splits == 0;
    const int taken = is_balanced ? min(tiles.num_chunks - chunk, end_ - chunk_) : 1;
    const int tile = chunk * tiles.tiles_per_chunk;
    work.b = b_;
    work.num_keys = tiles.num_keys;
    work.first_key = (tiles.first_tile + tile) * kTileKeys;
    work.num_tiles = min(taken * tiles.tiles_per_chunk, tiles.num_tiles - tile);
    work.split = SplitOf{chunk, tiles.num_chunks, begin_, b_, is_balanced};
    if (is_balanced) work.split = split_of(chunk, chunk + taken, tiles.num_chunks);
    chunk_ += taken;
    if (chunk + taken == tiles.num_chunks) {
      begin_ = chunk_;
      ++b_;
    }
    return true;
  }

 private:
  int share_, num_larger_;  // chunks per CTA group; the first num_larger_ take one more
  int chunk_, end_;         // remaining chunks of this CTA group
  int b_ = 0, begin_ = 0;   // sequence that contains chunk_, and its first chunk

  __device__ __forceinline__ static int ceil_div(int a, int b) { return (a + b - 1) / b; }
  // The split with chunks `begin` to `end` of the `num_chunks` of sequence b_. Whole sequences need
  // none of the divisions, which are slow.
  __device__ __forceinline__ SplitOf split_of(int begin, int end, int num_chunks) const {
    if (end - begin == num_chunks) return SplitOf{0, 1, 0, 0, true};
    const int own = blockIdx.y;
    const int first = begin == 0 ? own : cta_group_of(begin_);
    const int last = end == num_chunks ? own : cta_group_of(begin_ + num_chunks - 1);
    return SplitOf{own - first, last - first + 1, first, first, true};
  }
  // The CTA group that takes a chunk.
  __device__ __forceinline__ int cta_group_of(int chunk) const {
    const int others = chunk - num_larger_ * (share_ + 1);
    return others < 0 ? chunk / (share_ + 1) : num_larger_ + others / share_;
  }
  // Returns the sum of x over the lanes up to and including this one.
  __device__ __forceinline__ static int inclusive_sum(int x, int lane_idx) {
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, x, offset);
      if (lane_idx >= offset) x += other;
    }
    return x;
  }

  // Rounds the share up such that all sequences, of `length` chunks each, are split alike.
  __device__ __forceinline__ void round_share(const DecodeProblem& problem, int length,
                                              int lane_idx) {
    const int largest = share_ + (num_larger_ > 0), share = largest + lane_idx;
    const bool fits = lane_idx <= min(problem.split_cost, largest / 2) &&
                      (length % share == 0 || share % length == 0);
    const unsigned found = __ballot_sync(kFullMask, fits);
    if (found == 0) return;
    share_ = __shfl_sync(kFullMask, share, __ffs(found) - 1);
    num_larger_ = 0;
  }

  // Finds the sequence that contains chunk_, from b_ on: 32 sequences at a time.
  __device__ __forceinline__ void find_sequence(const DecodeProblem& problem, int lane_idx) {
    while (b_ < problem.batch) {
      const int b = b_ + lane_idx;
      const int chunks = b < problem.batch ? Tiles(problem, b).num_chunks : 0;
      const int prefix = inclusive_sum(chunks, lane_idx);
      const int skipped = __popc(__ballot_sync(kFullMask, begin_ + prefix <= chunk_));
      b_ += skipped;
      begin_ += __shfl_sync(kFullMask, skipped == kWarpSize ? prefix : prefix - chunks,
                            min(skipped, kWarpSize - 1));
      if (skipped < kWarpSize) return;
    }
  }
};

// A CTA group's share of the sequences without keys. All lanes of a warp must call next() together.
class EmptySequences {
 public:
  // Returns the index of the next one, or -1 if none is left.
  __device__ __forceinline__ int next(const DecodeProblem& problem) {
    const int num_cta_groups = gridDim.y;
    while (found_ == 0) {
      const int first = round_ * kWarpSize * num_cta_groups + blockIdx.y;
      if (first >= problem.batch) return -1;
      const int b = first + threadIdx.x % kWarpSize * num_cta_groups;
      found_ = __ballot_sync(kFullMask, b < problem.batch && problem.length(b) == 0);
      ++round_;
    }
    const int lane = __ffs(found_) - 1;
    found_ &= found_ - 1;
    return ((round_ - 1) * kWarpSize + lane) * num_cta_groups + blockIdx.y;
  }

 private:
  int round_ = 0;
  unsigned found_ = 0;  // lanes whose sequence of the last round is left
};

// For few sequences: a cluster's CTAs split one sequence and head, by its length alone.
template <int kTileKeys, int kCluster>
class ClusterScheduler {
 public:
  static constexpr bool kIsCluster = true;

  __device__ __forceinline__ explicit ClusterScheduler(const DecodeProblem&) {}

  __device__ __forceinline__ static int sequence() { return blockIdx.y; }

  // Returns true once, possibly for a work tile without key tiles.
  __device__ __forceinline__ bool next(const DecodeProblem& problem, WorkTile& work) {
    if (is_done_) return false;
    is_done_ = true;
    const int b = sequence(), rank = blockIdx.x % kCluster;
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
