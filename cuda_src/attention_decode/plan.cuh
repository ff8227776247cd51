// Who works on which keys in attention_decode_sm90: every warp plans for itself, from the lengths.
//
// The keys of each sequence are cut into tiles, and all tiles of the batch are one long line of T.
// A team is one block for each key/value head; its blocks walk along the same pages, so that what
// lies together in memory is read at the same time. Balanced, team i of G takes the tiles from
// i T / G to (i + 1) T / G, wherever they lie: all blocks have equal work, whatever the lengths,
// and a sequence is cut only where a team's share ends. With num_splits > 0 a sequence is cut into
// that many parts by its own length alone, and teams take whole parts: its result then does not
// depend on its neighbours. Sequences without keys are dealt out apart: batches are filled up with
// them. Nothing is read on the host, so captured graphs follow the lengths.
//
// In clusters the query tokens of a sequence may be divided too. Each part counts as a sequence of
// num_queries tokens then, whose keys end with its last token's.
#pragma once

#include "common/attention.cuh"

// SAFETY: a length that does not fit the block table is cut to it.
__device__ __forceinline__ int sequence_length(const int* context_lens, int b, int64_t max_keys) {
  return static_cast<int>(min(static_cast<int64_t>(max(context_lens[b], 0)), max_keys));
}

// What all plans of a launch have in common.
struct DecodeProblem {
  const int* context_lens;
  int64_t max_keys;
  int batch, num_kv_heads, num_queries, group, window;
  int num_splits;   // 0: balanced
  int token_parts;  // into which a sequence's query tokens are divided

  __device__ __forceinline__ int length(int b) const {
    const int later = (token_parts - 1 - b % token_parts) * num_queries;
    return max(sequence_length(context_lens, b / token_parts, max_keys) - later, 0);
  }
  __device__ __forceinline__ RowRule rows(int num_keys) const {
    return RowRule(num_queries, group, num_keys, true, window);
  }
};

// How the keys of a sequence are cut. A unit is what is dealt to teams: a tile, or with num_splits
// a part. Without keys there are no units; in a cluster one tile, which writes the zeros.
template <int kTileKeys>
struct SequencePlan {
  int num_keys;
  int first_tile;  // the first tile with a key that a row sees
  int tiles;       // from there to the end
  int chunk;       // tiles of a part, with num_splits
  int units;

  __device__ __forceinline__ SequencePlan(const DecodeProblem& problem, int b)
      : num_keys(problem.length(b)) {
    first_tile = problem.rows(num_keys).first_key(0) / kTileKeys;
    tiles = max((num_keys + kTileKeys - 1) / kTileKeys - first_tile, 1);
    chunk = problem.num_splits > 0 ? (tiles + problem.num_splits - 1) / problem.num_splits : 1;
    units = num_keys > 0 ? (tiles + chunk - 1) / chunk : 0;
  }
};

// The parts that a sequence is cut into, each with a slot of scratch memory (one a team or part; a
// row of it for each head), and their counter.
struct Parts {
  int part, count;  // this one, all
  int first;        // balanced: the team of part 0; else the slot of part 0
  int counter;
  bool balanced;

  // A team is the first of at most one sequence and a later one of at most one: it has two slots.
  __device__ __forceinline__ int64_t slot(int p) const {
    return balanced ? 2ll * (first + p) + (p == 0) : static_cast<int64_t>(first) + p;
  }
};

// A run of tiles of one sequence.
struct Segment {
  int b, num_keys;
  int first_key;  // of the first tile
  int num_tiles;
  Parts parts;
};

// Walks through a team's segments. All lanes of a warp must call it together.
template <int kTileKeys>
class DecodeCursor {
 public:
  using Plan = SequencePlan<kTileKeys>;

  __device__ __forceinline__ explicit DecodeCursor(const DecodeProblem& problem) {
    const int lane = threadIdx.x % kWarpSize;
    int units = 0;
    for (int b = lane; b < problem.batch; b += kWarpSize) units += Plan(problem, b).units;
    total_ = __reduce_add_sync(kFullMask, units);
    const int team = blockIdx.x / problem.num_kv_heads;
    if (team >= num_teams(problem)) return;
    unit_ = begin_of(team, problem);
    end_ = begin_of(team + 1, problem);
    find_sequence(problem, lane);
  }

  // False: nothing is left.
  __device__ __forceinline__ bool next(const DecodeProblem& problem, Segment& segment) {
    if (unit_ >= end_) return false;
    Plan plan(problem, b_);
    while (plan.units == 0 && b_ + 1 < problem.batch) plan = Plan(problem, ++b_);
    const int unit = unit_ - sequence_begin_;
    const bool balanced = problem.num_splits == 0;
    const int taken = balanced ? min(plan.units - unit, end_ - unit_) : 1;
    const int tile = unit * plan.chunk;
    segment.b = b_;
    segment.num_keys = plan.num_keys;
    segment.first_key = (plan.first_tile + tile) * kTileKeys;
    segment.num_tiles = min(taken * plan.chunk, plan.tiles - tile);
    segment.parts = Parts{unit, plan.units, sequence_begin_, b_, balanced};
    if (balanced) {
      const int team = blockIdx.x / problem.num_kv_heads;
      const bool whole = taken == plan.units;
      const int first = whole ? team : team_of(sequence_begin_, problem);
      const int last = whole ? team : team_of(sequence_begin_ + plan.units - 1, problem);
      segment.parts = Parts{team - first, last - first + 1, first, first, true};
    }
    unit_ += taken;
    if (unit + taken == plan.units) {
      sequence_begin_ = unit_;
      ++b_;
    }
    return true;
  }

 private:
  int total_;
  int unit_ = 0, end_ = 0;          // what is left of this team's units
  int b_ = 0, sequence_begin_ = 0;  // the sequence of unit_, and its first unit

  __device__ __forceinline__ int num_teams(const DecodeProblem& problem) const {
    return min(total_, static_cast<int>(gridDim.x) / problem.num_kv_heads);
  }
  __device__ __forceinline__ int begin_of(int team, const DecodeProblem& problem) const {
    return static_cast<int>(static_cast<int64_t>(team) * total_ / num_teams(problem));
  }
  __device__ __forceinline__ int team_of(int unit, const DecodeProblem& problem) const {
    return static_cast<int>((static_cast<int64_t>(unit + 1) * num_teams(problem) - 1) / total_);
  }

  __device__ __forceinline__ void find_sequence(const DecodeProblem& problem, int lane) {
    sequence_begin_ = 0;
    for (b_ = 0; b_ + kWarpSize < problem.batch; b_ += kWarpSize) {
      const int all = __reduce_add_sync(kFullMask, Plan(problem, b_ + lane).units);
      if (sequence_begin_ + all > unit_) break;
      sequence_begin_ += all;
    }
    const int units = b_ + lane < problem.batch ? Plan(problem, b_ + lane).units : 0;
    int up_to = units;  // of the sequences up to this lane's
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    const int skipped = __popc(__ballot_sync(kFullMask, sequence_begin_ + up_to <= unit_));
    sequence_begin_ += __shfl_sync(kFullMask, up_to - units, skipped);
    b_ += skipped;
  }
};

// Calls `each(b)` for this team's share of the sequences without keys. All lanes of a warp must call
// it together.
template <typename Each>
__device__ __forceinline__ void for_each_empty(const DecodeProblem& problem, Each each) {
  const int team = blockIdx.x / problem.num_kv_heads, teams = gridDim.x / problem.num_kv_heads;
#pragma unroll 1
  for (int first = team; first < problem.batch; first += kWarpSize * teams) {
    const int b = first + threadIdx.x % kWarpSize * teams;
    const bool is_empty = b < problem.batch && problem.length(b) == 0;
    unsigned found = __ballot_sync(kFullMask, is_empty);
#pragma unroll 1
    for (; found != 0; found &= found - 1) each(first + (__ffs(found) - 1) * teams);
  }
}

// For few sequences: a cluster of blocks divides one sequence and head, by its length alone.
template <int kTileKeys, int kCluster>
class ClusterCursor {
 public:
  __device__ __forceinline__ explicit ClusterCursor(const DecodeProblem&) {}

  __device__ __forceinline__ static int sequence(const DecodeProblem& problem) {
    return blockIdx.x / kCluster / problem.num_kv_heads;
  }

  // Once; without any tile perhaps.
  __device__ __forceinline__ bool next(const DecodeProblem& problem, Segment& segment) {
    if (is_done_) return false;
    is_done_ = true;
    const int b = sequence(problem), rank = blockIdx.x % kCluster;
    const SequencePlan<kTileKeys> plan(problem, b);
    const int begin = rank * plan.tiles / kCluster, end = (rank + 1) * plan.tiles / kCluster;
    segment = Segment{b, plan.num_keys, (plan.first_tile + begin) * kTileKeys, end - begin, {}};
    return true;
  }

 private:
  bool is_done_ = false;
};
