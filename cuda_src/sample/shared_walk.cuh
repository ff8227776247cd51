// Walks over a row, shared by all idle blocks.
//
// A row whose candidates do not fit into a list is queued as a Walk. Its chunks are first added to
// bins; once the bin that contains the cut is known, its chunks are drawn from. Any idle block
// takes chunks; the block that finishes the last chunk of a phase starts the next step. The sums
// are of integers and the draw is a maximum, so the result does not depend on which block takes
// which chunk.
//
// SAFETY: no block waits for another that may not have started. A row's owner waits only for chunks
// that running blocks have taken; a block without a row waits for more walks only once all blocks
// have started.
#pragma once

#include "sample/choose_params.cuh"
#include "sample/row_cut.cuh"

constexpr int kChunkGroups = kLoads * kThreads;
constexpr int kMaxWalks = 256;  // maximum number of queued walks; owners of further rows walk alone
// Phases of a walk; 0: not queued yet. kTied: too many candidates for a list are tied at the cut.
constexpr uint32_t kBinning = 1, kDrawing = 2, kDecided = 3, kTied = 4;

struct WalkQueue {
  uint32_t num_finished;  // number of finished rows
  uint32_t num_started;   // number of started blocks
  uint32_t num_walks, unused;
  uint32_t phases[kMaxWalks];
};

struct Walk {
  int row;
  uint32_t top;                // key of the row's largest logit
  float low;                   // see bins_of
  uint32_t taken[2], done[2];  // chunks taken and chunks done, by phase
  int bin;                     // bin that contains the cut; kBins: all candidates are drawn from
  uint32_t list_size;
  uint32_t num_drawn;  // candidates above the bin; at the end, all candidates kept
  uint64_t mass_before, needed, best;
  uint32_t counts[kBins];
  uint64_t masses[kBins];
  uint64_t list[kMaxCandidates];  // the bin's candidates
};
static_assert(sizeof(Walk) == 8 * WALK_WORDS && sizeof(WalkQueue) == 8 * QUEUE_WORDS,
              "engine/kernels/sample.py allocates other sizes");

__device__ __forceinline__ uint32_t read(const uint32_t* p) {
  return *static_cast<const volatile uint32_t*>(p);
}

struct SharedWalks {
  const SampleChooseParams& p;
  WalkQueue* queue;
  Walk* walks;
  int num_rows;

  // Opens a phase. Called by thread 0, after it has written all data of the phase.
  __device__ __forceinline__ void open(int idx, uint32_t phase) const {
    __threadfence();  // SAFETY: other blocks read the walk once they see the phase.
    atomicExch(&queue->phases[idx], phase);
  }

  __device__ __forceinline__ int take_chunk(uint32_t* taken, ChooseShared& s) const {
    __syncthreads();  // SAFETY: s.size was read, and the previous chunk is in shared memory.
    if (threadIdx.x == 0) s.size = static_cast<int>(atomicAdd(taken, 1u));
    __syncthreads();
    return s.size;
  }

  // Returns true in the block that finished the last of `all` chunks; this block then sees the
  // others' writes.
  __device__ __forceinline__ bool end_chunks(uint32_t* done, int own, int all,
                                             ChooseShared& s) const {
    __threadfence();  // SAFETY: the additions are visible before the chunks count as done.
    __syncthreads();
    if (threadIdx.x == 0) s.is_last = atomicAdd(done, static_cast<uint32_t>(own)) + own == all;
    __syncthreads();
    const bool is_last = s.is_last;
    if (is_last) __threadfence();
    return is_last;
  }

  __device__ __forceinline__ Job job(int idx) const {
    return job_of(p, __ldcg(&walks[idx].row), __ldcg(&walks[idx].top));
  }

  __device__ __forceinline__ void decide(int idx, uint64_t winner, int kept) const {
    if (threadIdx.x != 0) return;
    walks[idx].best = winner;
    walks[idx].num_drawn = static_cast<uint32_t>(kept);
    open(idx, kDecided);
  }

  // Finds the bin that contains the cut, once all candidates are in the walk's bins.
  __device__ __forceinline__ void find_cut(int idx, ChooseShared& s) const {
    Walk& walk = walks[idx];
    const Job job = this->job(idx);
    Histogram& bins = s.select.bins;
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      const uint64_t mass = __ldcg(&walk.masses[i]);
      bins.count[i] = __ldcg(&walk.counts[i]);
      bins.low[i] = static_cast<uint32_t>(mass);
      bins.high[i] = static_cast<uint32_t>(mass >> 32);
    }
    __syncthreads();
    int count, before_count;
    uint64_t total, before_mass;
    const RowBins rows = sum_bins(s, &count, &total);
    const uint64_t needed = share_of(total, job.share);
    const int bin = find_bin<true>(rows, needed, s, &before_count, &before_mass);
    if (threadIdx.x != 0) return;
    walk.bin = bin;
    walk.mass_before = before_mass;
    walk.needed = needed;
    open(idx, is_small(bin, s) ? kDrawing : kTied);
  }

  __device__ __forceinline__ bool add_chunks(int idx, ChooseShared& s) const {
    Walk& walk = walks[idx];
    const Job job = this->job(idx);
    const LinearBins<kBins> linear = bins_of(job, __ldcg(&walk.low));
    const int end = job.row.num_groups(), all = (end + kChunkGroups - 1) / kChunkGroups;
    int own = 0;
#pragma unroll 1
    for (int chunk; (chunk = take_chunk(&walk.taken[0], s)) < all; ++own) {
      if (own == 0) clear_bins(s);
      const int begin = chunk * kChunkGroups;
      add_to_bins(job, linear, begin, min(begin + kChunkGroups, end), s);
    }
    if (own == 0) return false;
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      if (s.select.bins.count[i] == 0) continue;
      atomicAdd(&walk.counts[i], s.select.bins.count[i]);
      atomicAdd(&walk.masses[i], s.select.bins.mass(i));
    }
    if (end_chunks(&walk.done[0], own, all, s)) find_cut(idx, s);
    return true;
  }

  // Draws among the candidates of groups [begin, end) in bins before `bin`, lists those in `bin`,
  // and returns this thread's number of the candidates drawn from.
  __device__ __forceinline__ int draw_groups(Walk& walk, const Job& job,
                                             const LinearBins<kBins>& linear, int bin, int begin,
                                             int end, Drawing& drawing, ChooseShared& s) const {
    int num_drawn = 0;
    for_each_group(
        job.row, begin, end,
        [&](const Vec<float, 4>& logits, int group) {
          float x[4];
          bool any = false;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] = job.x(logits.v[i]);
            const int own = x[i] >= job.lowest_x ? linear.bin(x[i]) : kBins + 1;
            if (own == bin) {
              walk.list[atomicAdd(&walk.list_size, 1u)] = order_of(logits.v[i], 4 * group + i);
            }
            if (own >= bin) x[i] = minus_inf();
            num_drawn += own < bin;
            any |= own < bin;
          }
          if (!any) return;
          const Words words = philox(job.seed, job.position, group);
#pragma unroll
          for (int i = 0; i < 4; ++i) drawing.consider(x[i], words.v[i], 4 * group + i);
        },
        [&] { share_best(drawing, s); });
    return num_drawn;
  }

  __device__ __forceinline__ bool draw_chunks(int idx, ChooseShared& s) const {
    Walk& walk = walks[idx];
    const Job job = this->job(idx);
    const LinearBins<kBins> linear = bins_of(job, __ldcg(&walk.low));
    const int bin = __ldcg(&walk.bin);
    const int end = job.row.num_groups(), all = (end + kChunkGroups - 1) / kChunkGroups;
    Drawing drawing = begin_drawing(s);
    int own = 0, num_drawn = 0;
#pragma unroll 1
    for (int chunk; (chunk = take_chunk(&walk.taken[1], s)) < all; ++own) {
      const int begin = chunk * kChunkGroups;
      num_drawn +=
          draw_groups(walk, job, linear, bin, begin, min(begin + kChunkGroups, end), drawing, s);
    }
    if (own == 0) return false;
    const uint64_t best = end_drawing(drawing, s);
    num_drawn = block_reduce<kWarps>(num_drawn, Sum<int>(), s.select.scratch);
    if (threadIdx.x == 0) {
      atomicMax(&walk.best, best);
      atomicAdd(&walk.num_drawn, static_cast<uint32_t>(num_drawn));
    }
    if (end_chunks(&walk.done[1], own, all, s)) end_draw(idx, s);
    return true;
  }

  // Draws from the candidates of the bin that contains the cut, once all chunks are done.
  __device__ __forceinline__ void end_draw(int idx, ChooseShared& s) const {
    const Walk& walk = walks[idx];
    const Job job = this->job(idx);
    const int n = static_cast<int>(__ldcg(&walk.list_size));
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += kThreads) s.list[i] = __ldcg(&walk.list[i]);
    __syncthreads();
    Drawing last{__ldcg(&walk.best), kGumbelLowest};
    int rest = 0;
    if (n > 0) {
      sort_list(n, s);
      rest = cut_bin(job, n, __ldcg(&walk.mass_before), __ldcg(&walk.needed), s);
      draw_list(job, rest, s, last);
    }
    const int kept = static_cast<int>(__ldcg(&walk.num_drawn)) + rest;
    decide(idx, end_drawing(last, s), kept);
  }

  // Works on the remaining chunks of a walk in `phase`; returns false if none were left.
  __device__ __forceinline__ bool work(int idx, uint32_t phase, ChooseShared& s) const {
    return phase == kBinning ? add_chunks(idx, s) : draw_chunks(idx, s);
  }

  // Returns thread 0's value in all threads.
  __device__ __forceinline__ uint32_t broadcast(uint32_t value, ChooseShared& s) const {
    __syncthreads();  // SAFETY: all threads have read the previous broadcast.
    if (threadIdx.x == 0) s.broadcast_value = value;
    __syncthreads();
    return s.broadcast_value;
  }

  // Queues row b; returns the walk's index, or kMaxWalks if the queue is full.
  __device__ __forceinline__ int enqueue(int64_t b, const Job& job, float low, uint32_t top,
                                         ChooseShared& s) const {
    uint32_t first = kMaxWalks;
    if (threadIdx.x == 0 && job.top_k == 0) first = atomicAdd(&queue->num_walks, 1u);
    const int idx = static_cast<int>(min(broadcast(first, s), static_cast<uint32_t>(kMaxWalks)));
    if (idx == kMaxWalks) return idx;
    Walk& walk = walks[idx];
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kThreads) walk.counts[i] = walk.masses[i] = 0;
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0) return idx;
    walk.row = static_cast<int>(b);
    walk.top = top;
    walk.low = low;
    walk.taken[0] = walk.taken[1] = walk.done[0] = walk.done[1] = 0;
    walk.bin = kBins;
    walk.list_size = walk.num_drawn = 0;
    walk.best = 0;
    open(idx, job.share == kWholeShare ? kDrawing : kBinning);
    return idx;
  }

  // Returns an open walk as index * 8 + phase; 0 if none is open, ~0 if no more can follow.
  __device__ __forceinline__ uint32_t find_open(uint32_t turn) const {
    const int lane_idx = threadIdx.x % kWarpSize;
    // One lane reads each counter for the whole warp: another lane could see a later value.
    const uint32_t own = read(&queue->num_finished + min(lane_idx, 2));
    if (__shfl_sync(kFullMask, own, 0) >= static_cast<uint32_t>(num_rows)) return ~0u;
    if (__shfl_sync(kFullMask, own, 1) < gridDim.x * gridDim.y) return ~0u;
    const int count = min(static_cast<int>(__shfl_sync(kFullMask, own, 2)), kMaxWalks);
    for (int i = 0; i < count; i += kWarpSize) {
      // Blocks start at different walks, to spread across them.
      const int idx = (i + lane_idx + static_cast<int>(turn)) % max(count, 1);
      const uint32_t phase = i + lane_idx < count ? read(&queue->phases[idx]) : 0;
      const uint32_t open = __ballot_sync(kFullMask, phase == kBinning || phase == kDrawing);
      if (open == 0) continue;
      return __shfl_sync(kFullMask, static_cast<uint32_t>(idx) * 8 + phase, __ffs(open) - 1);
    }
    return 0;
  }

  // Counts a row as finished; returns true if it was the last.
  __device__ __forceinline__ bool finish() const {
    return atomicAdd(&queue->num_finished, 1u) + 1 == static_cast<uint32_t>(num_rows);
  }

  // Returns the next walk to work on, in find_open's encoding: any walk if `own` is negative, else
  // only `own`.
  __device__ __forceinline__ uint32_t next(int own, uint32_t turn, ChooseShared& s) const {
    uint32_t seen = 0;
    if (own >= 0) {
      const uint32_t phase = read(&queue->phases[own]);
      seen = static_cast<uint32_t>(own) * 8 + phase;
    } else if (threadIdx.x < kWarpSize) {
      seen = find_open(turn);
    }
    seen = broadcast(seen, s);
    __threadfence();  // SAFETY: the walk must be read after its phase.
    return seen;
  }
};
