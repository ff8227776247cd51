// State of a CTA of attention_decode_sm90: its head, its arrays, and each warp's position in the
// schedule.
#pragma once

#include "attention_decode/attention_decode_config_sm90.cuh"
#include "common/decode_scheduler.cuh"

using Scheduler = SchedulerOf<kTileKeys, kCluster>::Type;

// Locations of tokens in the pages: slot = page id * page size + offset.
struct PageLayout {
  int block_shift, num_blocks;
  int page_rows, head_rows, token_rows, row_elements;

  // Slot of key `key` of the sequence with this block table.
  __device__ __forceinline__ int64_t slot(const int* table, int key) const {
    const unsigned page = clamped_page(table[key >> block_shift], num_blocks);
    return (static_cast<int64_t>(page) << block_shift) + (key & ((1 << block_shift) - 1));
  }
  // Page row of a token and head; it fits 32 bits (is_supported in
  // engine/kernels/attention_decode/sm90.py).
  __device__ __forceinline__ int row(int page, int kv_head, int token) const {
    return page * page_rows + kv_head * head_rows + token * token_rows;
  }
  // Offset of a page row in the pages, in elements.
  __device__ __forceinline__ int64_t offset(int row) const {
    return static_cast<int64_t>(row) * row_elements;
  }
  // Offset of a slot and head, or -1 if the slot is outside the pages.
  __device__ __forceinline__ int64_t offset(int64_t slot, int kv_head) const {
    if (slot < 0 || slot >= static_cast<int64_t>(num_blocks) << block_shift) return -1;
    return offset(row(slot >> block_shift, kv_head, slot & ((1 << block_shift) - 1)));
  }
};

// A CTA processes one key/value head. `b` is an index of the schedule's sequences, of which there
// are token_parts per sequence of the batch.
struct Cta {
  const AttentionDecodeSm90Params& p;
  unsigned char* smem;
  int token_parts, num_queries;  // compile-time constants where possible: divisions are slow
  DecodeProblem problem;
  PageLayout layout;

  __device__ __forceinline__ Cta(const AttentionDecodeSm90Params& p, unsigned char* smem)
      : p(p),
        smem(smem),
        token_parts(kCluster > 1 ? p.token_parts : 1),
        num_queries(kNewToken ? 1 : p.num_queries),
        problem{p.context_lens, p.max_keys,   p.batch,    num_queries, p.group,
                p.window,       p.num_splits, kSplitCost, token_parts, !kNewToken},
        layout{p.block_shift, p.num_blocks, p.page_rows,
               p.head_rows,   p.token_rows, p.row_elements} {}

  __device__ static __forceinline__ int kv_head() { return blockIdx.x / kCluster; }
  // The first query head of the group.
  __device__ __forceinline__ int head() const { return kv_head() * p.group; }
  __device__ __forceinline__ const int* table(int b) const {
    return p.block_tables + b / token_parts * p.table_stride;
  }
  __device__ __forceinline__ Queries queries(int b) const {
    const int sequence = b / token_parts, token = b % token_parts * num_queries;
    return Queries{p.q + sequence * p.q_stride_b + token * p.q_stride_t + head() * p.q_stride_h,
                   p.q_stride_t, p.q_stride_h, kHeadDim, true};
  }
  __device__ __forceinline__ Output output(int b) const {
    const int64_t lse_begin = static_cast<int64_t>(b) * num_queries * p.num_heads + head();
    const int sequence = b / token_parts, token = b % token_parts * num_queries;
    return Output{
        p.out + sequence * p.out_stride_b + token * p.out_stride_t + head() * p.out_stride_h,
        p.out_stride_t,
        p.out_stride_h,
        p.lse == nullptr ? nullptr : p.lse + lse_begin,
        p.sinks == nullptr ? nullptr : p.sinks + head(),
        p.num_heads,
        kNewToken ? kRows : p.group,  // all rows are the new token's: no division by the group
        kHeadDim,
        true,
        kHasCodes ? p.v_scale[kv_head()] : 1.0f,
        kQuantizesOut ? p.codes + lse_begin * kHeadDim : nullptr,
        kQuantizesOut ? p.scales + lse_begin : nullptr};
  }
  // Rule for which keys the rows of a work tile see.
  __device__ __forceinline__ RowRule rows(const WorkTile& work) const {
    RowRule rows = problem.rows(work.num_keys);
    if (p.tree_masks != nullptr) {
      rows.tree = p.tree_masks + static_cast<int64_t>(work.b) * num_queries;
      rows.earlier = work.b % token_parts * num_queries;
    }
    return rows;
  }
};

// Scheduler and work tile of a consumer or new-token warp. They are in shared memory because the
// inner loop needs the registers.
struct WarpSchedule {
  Scheduler scheduler;
  WorkTile work;

  // Takes the next work tile; returns false if none is left.
  __device__ __forceinline__ bool next(const DecodeProblem& problem) {
    __syncwarp();  // SAFETY: all lanes have read the scheduler before any of them writes it.
    Scheduler advanced = scheduler;
    WorkTile found;
    const bool has_work = advanced.next(problem, found);
    __syncwarp();
    scheduler = advanced;
    if (has_work) work = found;
    __syncwarp();
    return has_work;
  }
};
static_assert(sizeof(WarpSchedule) <= kScheduleBytes, "see kScheduleAt");

// This warp's schedule. The producer warp, between the consumer and the new-token warps, has none.
__device__ __forceinline__ WarpSchedule& warp_schedule(unsigned char* smem) {
  const int warp_idx = threadIdx.x / kWarpSize;
  const int index = warp_idx - (warp_idx > kConsumerWarps);
  return reinterpret_cast<WarpSchedule*>(smem + kScheduleAt)[index];
}
