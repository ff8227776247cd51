// Shared memory of the prepare kernel.
#pragma once

#include "gated_delta/gated_delta_chunk.cuh"

constexpr int kPrepareThreads = 128;
constexpr int kHalf = kChunkTokens / 2;
constexpr int kSystemPitch = kChunkTokens + 4;
constexpr int kWidePitch = (kKeyDim > kValueDim ? kKeyDim : kValueDim) + kPad;

constexpr int kChannelPitch = kKeyDim + 2;

struct PrepareShared {
  scalar_t k[kChunkTokens * kKeyPitch];
  scalar_t q_or_v[kChunkTokens * kWidePitch];
  float system[kChunkTokens * kSystemPitch];  // A, then T; upper right quarter: A21 T11
  // Of each token: c in log2 units, beta, 1 / |k|, scale / |q|; the last three end with zeros.
  float log_decay[kChunkTokens], beta[kChunkTokens];
  float k_factor[kChunkTokens], q_factor[kChunkTokens];
  // With a gate per channel: c of each token and channel.
  float channel_decay[kHasChannelGate ? kChunkTokens * kChannelPitch : 1];
};
