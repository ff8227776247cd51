// State slots of recurrent ops: which state a sequence of the batch starts from, and where its
// states are written.
//
// SAFETY: bounds and slots are clamped to the arrays, so corrupt tables cause no stray access; a
// slot outside the states reads as zeros and is not written.
#pragma once

#include "common/types.cuh"

// The parameters of such an op begin with these. State: dtype of the states.
template <typename State>
struct StateSlotParams {
  State* states;  // (num_slots, ...), slots slot_stride elements apart
  int64_t slot_stride;
  int num_slots;
  int num_tokens;               // T
  const int* cu_seqlens_q;      // (B+1,)
  const int* context_lens;      // (B,) lengths including these tokens
  const int* state_slots;       // (B,)
  const int* state_targets;     // (B,), or (B, num_targets) if num_targets > 0
  int num_targets;              // Q or 0
  int num_sequences;            // B
  const int* snapshot_slots;    // (B,) or null
  const int* snapshot_offsets;  // (B,) tokens before the snapshot; null without snapshots
};

// A sequence's tokens, and the slot of the state before them: -1 for zeros.
struct Sequence {
  int begin, end, first_slot;

  __device__ __forceinline__ int num_tokens() const { return end - begin; }
};

template <typename P>
__device__ __forceinline__ int checked_slot(const P& p, int slot) {
  return static_cast<unsigned>(slot) < static_cast<unsigned>(p.num_slots) ? slot : -1;
}

template <typename P>
__device__ __forceinline__ Sequence load_sequence(const P& p, int b) {
  const int begin = min(max(p.cu_seqlens_q[b], 0), p.num_tokens);
  const int end = min(max(p.cu_seqlens_q[b + 1], begin), p.num_tokens);
  const int slot = p.state_slots[b];  // loaded beside the others, not after them
  const bool has_state = p.context_lens[b] > end - begin;
  return {begin, end, has_state ? checked_slot(p, slot) : -1};
}

// Slot for the state after the first `count` of a sequence's `num_tokens` tokens, or -1.
// state_targets is (B,), or (B, num_targets) if num_targets > 0: then a sequence of more tokens, a
// prefill beside drafts, keeps its last state only, in the last slot.
template <typename P>
__device__ __forceinline__ int target_slot(const P& p, int b, int count, int num_tokens) {
  if (p.num_targets == 0) return count == num_tokens ? checked_slot(p, p.state_targets[b]) : -1;
  if (num_tokens > p.num_targets && count < num_tokens) return -1;
  const int column = min(count, p.num_targets) - 1;
  return checked_slot(p, p.state_targets[static_cast<int64_t>(b) * p.num_targets + column]);
}

// Slot for a snapshot of the state after the first `count` tokens, or -1.
template <typename P>
__device__ __forceinline__ int snapshot_slot(const P& p, int b, int count) {
  if (p.snapshot_slots == nullptr || p.snapshot_offsets[b] != count) return -1;
  return checked_slot(p, p.snapshot_slots[b]);
}
