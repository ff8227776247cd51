// Position of a producer or consumer in a ring of stages.
//
// Public: sm_80 up.
#pragma once

// The next stage, and the parity of the phase that its mbarrier must have completed first. A
// consumer starts with parity 0. A producer starts with parity 1: on a new mbarrier the phase
// before the first counts as completed.
template <int kStages>
struct PipelineState {
  int stage = 0;
  unsigned phase;

  // `phase`: the parity to start with, 0 or 1.
  __device__ __forceinline__ explicit PipelineState(unsigned phase) : phase(phase) {}
  // Moves on to the next stage; each thread that uses the ring calls it, once per stage.
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};
