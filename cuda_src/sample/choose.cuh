// Second stage of sampling, sample_choose: one or more blocks per row.
#pragma once

#include "sample/result.cuh"
#include "sample/scan.cuh"

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= kFloatMax; }

__device__ __forceinline__ bool has_usable_parameters(const SampleChooseParams& p, int64_t b) {
  const float temperature = p.temperature[b], top_p = p.top_p[b], min_p = p.min_p[b];
  const float repetition = p.repetition_penalty ? p.repetition_penalty[b] : 1.0f;
  const float presence = p.presence_penalty ? p.presence_penalty[b] : 0.0f;
  const float frequency = p.frequency_penalty ? p.frequency_penalty[b] : 0.0f;
  return temperature >= 0.0f && is_finite(temperature) && top_p > 0.0f && top_p <= 1.0f &&
         min_p >= 0.0f && min_p <= 1.0f && repetition > 0.0f && is_finite(repetition) &&
         is_finite(presence) && is_finite(frequency);
}

// Returns the lowest of the segments' maxima, ignoring -inf.
__device__ __forceinline__ float lowest_of_largest(const uint32_t (&keys)[kKeysPerThread],
                                                   uint64_t* scratch) {
  return from_ordered_key(~block_max<kWarps>(inverse_of_lowest(keys), scratch));
}

// Returns the lowest id whose logit has the key `top`, the largest of all keys.
__device__ int first_of_largest(const Row& row, const uint32_t (&keys)[kKeysPerThread],
                                uint32_t top, int shift, uint64_t* scratch) {
  uint32_t inverse = 0;
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) {
    if (keys[i] == top) inverse = max(inverse, ~static_cast<uint32_t>(i * kThreads + threadIdx.x));
  }
  const int segment = static_cast<int>(~block_max<kWarps>(inverse, scratch));
  inverse = 0;
  const int group = (segment << shift) * kWarpSize + static_cast<int>(threadIdx.x);
  if (static_cast<int>(threadIdx.x) < kWarpSize << shift) {
    const Vec<float, 4> x = row.group(group);
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      if (ordered_key(x.v[i]) == top) inverse = ~static_cast<uint32_t>(4 * group + i);
    }
  }
  return static_cast<int>(~block_max<kWarps>(inverse, scratch));
}

// Merges the draws of the row's blocks; returns true in the last block to arrive, which holds the
// result.
__device__ bool join_draws(DrawState* state, uint64_t* best, int* num_kept, ChooseShared& s) {
  if (gridDim.y == 1) return true;
  if (threadIdx.x == 0) {
    atomicMax(&state->best, *best);
    atomicAdd(&state->num_kept, static_cast<uint32_t>(*num_kept));
    __threadfence();  // SAFETY: both are written before this block counts as done.
    s.is_last = atomicAdd(&state->num_done, 1u) == gridDim.y - 1;
    __threadfence();
    s.list[0] = atomicMax(&state->best, 0ull);
    s.size = static_cast<int>(atomicAdd(&state->num_kept, 0u));
  }
  __syncthreads();
  *best = s.list[0];
  *num_kept = s.size;
  const bool is_last = s.is_last;
  __syncthreads();  // SAFETY: all threads have read s.list and s.size before they are reused.
  return is_last;
}

// Cuts and draws from a list of the row's largest logits; returns kNoToken if the list is too
// short.
__device__ __forceinline__ Result choose_from_list(const SampleChooseParams& p, int64_t b,
                                                   const Job& job,
                                                   const uint32_t (&keys)[kKeysPerThread],
                                                   uint32_t top, ChooseShared& s) {
  int wanted = max(job.top_k > 0 ? job.top_k : kListed, p.num_top);
  const int most = job.top_k > 0 ? wanted : max(wanted, most_listed(p.num_segments));
  Result result{kNoToken, -1, kUncertain};
  for (; wanted <= kMaxCandidates; wanted = most) {
    bool is_whole;
    result.num_listed = list_largest(job.row, keys, top, wanted, p.shift, s, &is_whole);
    if (result.num_listed < 0) break;
    result.kept =
        cut_list(job, result.num_listed, is_whole, p.tiles + b * p.num_tiles, p.num_tiles, s);
    if (result.kept != kUncertain || wanted >= most) break;
  }
  if (result.num_listed < 0 || result.kept < 0) return Result{kNoToken, -1, 0};
  Drawing drawing{0, kGumbelLowest};
  draw_list(job, result.kept, s, drawing);
  result.token = id_of(end_drawing(drawing, s));
  return result;
}

// This block's role for row blockIdx.x.
struct Role {
  bool is_random;  // the token is drawn; false: the largest logit wins
  bool is_shared;  // a draw without filters, shared by all blocks of the row
  bool is_helper;  // the row may need a walk: its blocks then also help with other walks
  bool is_owner;   // the block chooses the row's token, or takes part in its draw

  __device__ __forceinline__ Role(const SampleChooseParams& p, int64_t b) {
    is_random = p.temperature[b] > 0.0f;
    const bool is_cut = is_random && is_filtered(p.top_k[b], p.top_p[b], p.min_p[b], p.vocab);
    is_shared = is_random && !is_cut;
    is_helper = is_cut && !(p.top_k[b] > 0 && p.top_k[b] < p.vocab);
    is_owner = blockIdx.y == 0 || is_shared;
  }
};

// This block's share of a draw among all candidates of the row; returns true if this block holds
// the result.
__device__ __forceinline__ bool draw_share(const SampleChooseParams& p, int64_t b, const Job& job,
                                           Result& result, ChooseShared& s) {
  const int groups = (job.row.num_groups() + gridDim.y - 1) / gridDim.y;
  const int begin = min(static_cast<int>(blockIdx.y) * groups, job.row.num_groups());
  const int end = min(begin + groups, job.row.num_groups());
  uint64_t winner = draw_row<false>(job, 0, begin, end, s, &result.kept);
  if (!join_draws(p.states + b, &winner, &result.kept, s)) return false;
  result.token = id_of(winner);
  return true;
}

// Chooses row b's token, or queues a walk of the row and stores its index in *own. Returns false if
// another block holds the result.
__device__ __forceinline__ bool choose_owned(const SharedWalks& walks, const Role& role, int64_t b,
                                             const uint32_t (&keys)[kKeysPerThread], Result& result,
                                             int* own, ChooseShared& s) {
  const SampleChooseParams& p = walks.p;
  const bool can_use = has_usable_parameters(p, b);
  const uint32_t top = largest_key(keys, s.select.scratch);
  if (!can_use || top >= kInfKey || top <= kMinusInfKey) {
    result = Result{can_use ? kBadLogitsToken : kBadParameterToken, -1, 0};
    return blockIdx.y == 0;
  }
  if (!role.is_random) {
    result.token = first_of_largest(row_of(p, b), keys, top, p.shift, s.select.scratch);
    return true;
  }
  const Job job = job_of(p, b, top);
  if (role.is_shared) return draw_share(p, b, job, result, s);
  result = choose_from_list(p, b, job, keys, top, s);
  if (result.token < 0) {
    *own = walks.enqueue(b, job, lowest_of_largest(keys, s.select.scratch), top, s);
  }
  return true;
}

// Writes the row's result as soon as it is known, and helps with walks until none are left. Returns
// true if the block must walk its row alone: `own` is kMaxWalks, or its walk ended as kTied.
__device__ __forceinline__ bool serve_walks(const SharedWalks& walks, const Role& role,
                                            Result& result, int own, ChooseShared& s) {
  for (uint32_t turn = blockIdx.x + blockIdx.y * gridDim.x; own != kMaxWalks; ++turn) {
    // Opaque to the compiler, so that it does not hoist dependent addresses out of the loop into
    // registers.
    int row = static_cast<int>(blockIdx.x);
    asm volatile("" : "+r"(row));
    if (result.token != kNoToken) {
      write_result(walks.p, result, row, s);
      result.token = kNoToken;
      uint32_t is_last = 0;
      if (threadIdx.x == 0) is_last = walks.finish();
      if (!role.is_helper || walks.broadcast(is_last, s)) return false;
    }
    const uint32_t next = walks.next(own, turn, s);
    if (next == ~0u) return false;
    const int idx = static_cast<int>(next / 8);
    const uint32_t phase = next % 8;
    if (phase == kDecided) {
      const Walk& walk = walks.walks[idx];
      result = Result{id_of(__ldcg(&walk.best)), -1, static_cast<int>(__ldcg(&walk.num_drawn))};
      own = -1;
    } else if (phase == kTied) {
      return true;
    } else if (phase == 0 || !walks.work(idx, phase, s)) {
      __nanosleep(100);
    }
  }
  return true;
}

// Walks the row without help from other blocks.
__device__ __forceinline__ void walk_alone(const SharedWalks& walks, int64_t b, Result& result,
                                           ChooseShared& s) {
  const SampleChooseParams& p = walks.p;
  uint32_t keys[kKeysPerThread];
  load_keys(p.keys + b * 2 * kMaxSegments, p.num_segments, keys);
  const Job job = job_of(p, b, largest_key(keys, s.select.scratch));
  const float low = lowest_of_largest(keys, s.select.scratch);
  result.token = id_of(choose_from_row(job, low, s, &result.kept));
  write_result(p, result, b, s);
  if (threadIdx.x == 0) walks.finish();
}
