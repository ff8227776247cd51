// Walking rows by all blocks that have nothing else to do.
//
// A row whose candidates do not fit a list is put up on a board as a Walk: chunks to be added to
// bins, then, once the bin with the cut is known, chunks to be drawn from. Whoever is free takes
// chunks; whoever ends the last one of a phase does what follows. Sums are of integers and the draw
// is a maximum, so the result does not depend on who takes what.
//
// Nobody waits for a block that may not have started: a row's owner waits for chunks that running
// blocks have taken, and a block that has no row waits for more only once all have started.
#pragma once

#include "sample/row_cut.cuh"

constexpr int kChunkGroups = kLoads * kThreads;
constexpr int kMaxWalks = 256;  // rows beyond are walked by their owners alone
// Phases of a walk; 0: not open yet. kTied: the cut lies among more candidates than a list holds.
constexpr uint32_t kBinning = 1, kDrawing = 2, kDecided = 3, kTied = 4;

struct Board {
  uint32_t num_finished;  // rows
  uint32_t num_started;   // blocks
  uint32_t num_walks, unused;
  uint32_t phases[kMaxWalks];
};

struct Walk {
  int row;
  uint32_t top;                  // key of its largest logit
  float low;                     // as for bins_of
  uint32_t tickets[2], done[2];  // chunks of either phase that were taken, and ended
  int bin;                       // that with the cut; kBins: all are drawn from
  uint32_t list_size;
  uint32_t num_drawn;  // candidates above the bin; in the end, all that stay
  uint64_t mass_before, needed, best;
  uint32_t counts[kBins];
  uint64_t masses[kBins];
  uint64_t list[kMaxCandidates];  // the bin's candidates
};
static_assert(sizeof(Walk) == 8 * 4104, "the size that engine/kernels/sample.py allocates");

// The rows, and what is asked of each.
struct Batch {
  const float* logits;
  int64_t stride;
  int vocab;
  const float* processed;
  int64_t processed_stride;
  const int* is_processed;
  const float* temperature;
  const int* top_k;
  const float *top_p, *min_p;
  const uint64_t* seeds;
  const int64_t* positions;

  __device__ __forceinline__ bool is_changed(int64_t b) const {
    return is_processed && is_processed[b];
  }
  __device__ __forceinline__ Row raw(int64_t b) const { return Row(logits + b * stride, vocab); }
  __device__ __forceinline__ Row row(int64_t b) const {
    return is_changed(b) ? Row(processed + b * processed_stride, vocab) : raw(b);
  }
  __device__ __forceinline__ Job job(int64_t b, uint32_t top) const {
    return make_job(row(b), from_ordered_key(top), temperature[b], top_k[b], top_p[b], min_p[b],
                    seeds[b], positions[b]);
  }
};

__device__ __forceinline__ uint32_t read(const uint32_t* p) {
  return *static_cast<const volatile uint32_t*>(p);
}

struct Team {
  Batch batch;
  Board* board;
  Walk* walks;
  int num_rows;

  // By thread 0 only, which must have written all that the phase needs.
  __device__ __forceinline__ void open(int slot, uint32_t phase) const {
    __threadfence();  // SAFETY: others read the walk once they see the phase.
    atomicExch(&board->phases[slot], phase);
  }

  __device__ __forceinline__ int take_chunk(uint32_t* ticket, ChooseShared& s) const {
    __syncthreads();  // SAFETY: s.size was read, and the chunk before is in shared memory.
    if (threadIdx.x == 0) s.size = static_cast<int>(atomicAdd(ticket, 1u));
    __syncthreads();
    return s.size;
  }

  // True in the block that ended the last of `all` chunks; it sees what the others wrote.
  __device__ __forceinline__ bool end_chunks(uint32_t* done, int own, int all,
                                             ChooseShared& s) const {
    __threadfence();  // SAFETY: what was added is there before the chunks count as done.
    __syncthreads();
    if (threadIdx.x == 0) s.is_last = atomicAdd(done, static_cast<uint32_t>(own)) + own == all;
    __syncthreads();
    const bool is_last = s.is_last;
    if (is_last) __threadfence();
    return is_last;
  }

  __device__ __forceinline__ Job job_of(int slot) const {
    return batch.job(__ldcg(&walks[slot].row), __ldcg(&walks[slot].top));
  }

  __device__ __forceinline__ void decide(int slot, uint64_t winner, int kept) const {
    if (threadIdx.x != 0) return;
    walks[slot].best = winner;
    walks[slot].num_drawn = static_cast<uint32_t>(kept);
    open(slot, kDecided);
  }

  // What follows when all candidates are in the walk's bins.
  __device__ __forceinline__ void find_cut(int slot, ChooseShared& s) const {
    Walk& walk = walks[slot];
    const Job job = job_of(slot);
    Histogram& bins = s.select.bins;
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      const uint64_t weight = __ldcg(&walk.masses[i]);
      bins.count[i] = __ldcg(&walk.counts[i]);
      bins.low[i] = static_cast<uint32_t>(weight);
      bins.high[i] = static_cast<uint32_t>(weight >> 32);
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
    open(slot, is_small(bin, s) ? kDrawing : kTied);
  }

  __device__ __forceinline__ bool add_chunks(int slot, ChooseShared& s) const {
    Walk& walk = walks[slot];
    const Job job = job_of(slot);
    const LinearBins<kBins> linear = bins_of(job, __ldcg(&walk.low));
    const int end = job.row.num_groups(), all = (end + kChunkGroups - 1) / kChunkGroups;
    int own = 0;
#pragma unroll 1
    for (int chunk; (chunk = take_chunk(&walk.tickets[0], s)) < all; ++own) {
      if (own == 0) clear_bins(s);
      const int begin = chunk * kChunkGroups;
      add_to_bins(job, linear, begin, min(begin + kChunkGroups, end), s);
    }
    if (own == 0) return false;
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      if (s.select.bins.count[i] == 0) continue;
      atomicAdd(&walk.counts[i], s.select.bins.count[i]);
      atomicAdd(&walk.masses[i], s.select.bins.weight(i));
    }
    if (end_chunks(&walk.done[0], own, all, s)) find_cut(slot, s);
    return true;
  }

  // Draws among the candidates of groups [begin, end) in bins before `bin`, lists those in it, and
  // returns how many of the former the thread has met.
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

  __device__ __forceinline__ bool draw_chunks(int slot, ChooseShared& s) const {
    Walk& walk = walks[slot];
    const Job job = job_of(slot);
    const LinearBins<kBins> linear = bins_of(job, __ldcg(&walk.low));
    const int bin = __ldcg(&walk.bin);
    const int end = job.row.num_groups(), all = (end + kChunkGroups - 1) / kChunkGroups;
    Drawing drawing = begin_drawing(s);
    int own = 0, num_drawn = 0;
#pragma unroll 1
    for (int chunk; (chunk = take_chunk(&walk.tickets[1], s)) < all; ++own) {
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
    if (end_chunks(&walk.done[1], own, all, s)) end_draw(slot, s);
    return true;
  }

  // What follows when all chunks were drawn from: the bin's own candidates.
  __device__ __forceinline__ void end_draw(int slot, ChooseShared& s) const {
    const Walk& walk = walks[slot];
    const Job job = job_of(slot);
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
    decide(slot, end_drawing(last, s), kept);
  }

  // Takes what chunks there are of a walk in `phase`; false if there were none.
  __device__ __forceinline__ bool work(int slot, uint32_t phase, ChooseShared& s) const {
    return phase == kBinning ? add_chunks(slot, s) : draw_chunks(slot, s);
  }

  // The same value in all threads, from thread 0's.
  __device__ __forceinline__ uint32_t broadcast(uint32_t value, ChooseShared& s) const {
    __syncthreads();  // SAFETY: what was broadcast before has been read.
    if (threadIdx.x == 0) s.told = value;
    __syncthreads();
    return s.told;
  }

  // Puts row b up; returns its slot, or kMaxWalks if there is none left.
  __device__ __forceinline__ int put_up(int64_t b, const Job& job, float low, uint32_t top,
                                        ChooseShared& s) const {
    uint32_t first = kMaxWalks;
    if (threadIdx.x == 0 && job.top_k == 0) first = atomicAdd(&board->num_walks, 1u);
    const int slot = static_cast<int>(min(broadcast(first, s), static_cast<uint32_t>(kMaxWalks)));
    if (slot == kMaxWalks) return slot;
    Walk& walk = walks[slot];
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins; i += kThreads) walk.counts[i] = walk.masses[i] = 0;
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0) return slot;
    walk.row = static_cast<int>(b);
    walk.top = top;
    walk.low = low;
    walk.tickets[0] = walk.tickets[1] = walk.done[0] = walk.done[1] = 0;
    walk.bin = kBins;
    walk.list_size = walk.num_drawn = 0;
    walk.best = 0;
    open(slot, job.share == kWholeShare ? kDrawing : kBinning);
    return slot;
  }

  // An open walk: its slot * 8 + phase; 0 if there is none, ~0 if there is nothing to wait for.
  __device__ __forceinline__ uint32_t look(uint32_t turn) const {
    const int lane = threadIdx.x % kWarpSize;
    // One lane's view for the whole warp: another lane's may be later.
    const uint32_t own = read(&board->num_finished + min(lane, 2));
    if (__shfl_sync(kFullMask, own, 0) >= static_cast<uint32_t>(num_rows)) return ~0u;
    if (__shfl_sync(kFullMask, own, 1) < gridDim.x * gridDim.y) return ~0u;
    const int count = min(static_cast<int>(__shfl_sync(kFullMask, own, 2)), kMaxWalks);
    for (int i = 0; i < count; i += kWarpSize) {
      // Every block begins at a place of its own, so that they spread over the walks.
      const int slot = (i + lane + static_cast<int>(turn)) % max(count, 1);
      const uint32_t phase = i + lane < count ? read(&board->phases[slot]) : 0;
      const uint32_t open = __ballot_sync(kFullMask, phase == kBinning || phase == kDrawing);
      if (open == 0) continue;
      return __shfl_sync(kFullMask, static_cast<uint32_t>(slot) * 8 + phase, __ffs(open) - 1);
    }
    return 0;
  }

  // Counts a row as finished; true if it was the last.
  __device__ __forceinline__ bool finish() const {
    return atomicAdd(&board->num_finished, 1u) + 1 == static_cast<uint32_t>(num_rows);
  }

  // What is to be done next: a walk's slot * 8 + phase, of `own` unless that is negative; 0 for
  // nothing yet, ~0 if there is nothing to wait for.
  __device__ __forceinline__ uint32_t next(int own, uint32_t turn, ChooseShared& s) const {
    uint32_t seen = 0;
    if (own >= 0) {
      const uint32_t phase = read(&board->phases[own]);
      seen = static_cast<uint32_t>(own) * 8 + phase;
    } else if (threadIdx.x < kWarpSize) {
      seen = look(turn);
    }
    seen = broadcast(seen, s);
    __threadfence();  // SAFETY: the walk is read after its phase.
    return seen;
  }
};
