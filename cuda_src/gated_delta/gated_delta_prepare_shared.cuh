// Shared memory of the prepare kernel.
#pragma once

#include "gated_delta/gated_delta_chunk.cuh"
#include "common/mma_operands.cuh"

constexpr int kPrepareThreads = 128;
constexpr int kBlock = 16;  // tokens of a warp
constexpr int kBlocks = kChunkTokens / kBlock;
// Rows are 16 bytes longer than their values: ldmatrix meets no bank twice.
constexpr int kKeyPitch = kKeyDim + 8;
constexpr int kTrianglePitch = kChunkTokens + 8;
constexpr int kDiagonalPitch = kBlock + 4;
constexpr int kChannelPitch = kKeyDim + 8;  // eight rows' pairs are in different banks

// A float as the sum of two bfloat16 values, with a relative error of 2^-16.
struct SplitPair {
  uint32_t high, low;

  __device__ __forceinline__ SplitPair(float x, float y) {
    high = pack2<__nv_bfloat16>(x, y);
    const auto pair = reinterpret_cast<const Vec<__nv_bfloat16, 2>&>(high);
    low = pack2<__nv_bfloat16>(x - to_float(pair.v[0]), y - to_float(pair.v[1]));
  }
};

// A 64 x 64 lower triangular matrix, in rows of kTrianglePitch.
using Triangle = uint16_t[kChunkTokens * kTrianglePitch];

// The matrix A, split into a high and a low part. Once they are known, the inverses of the diagonal
// blocks of I + A take the place of A's.
struct System {
  Triangle high, low;
};

struct PrepareTriangles {
  System system;
  Triangle inverse, reads;  // values of scalar_t
};
struct PrepareOperands {
  scalar_t k[kChunkTokens * kKeyPitch], q[kChunkTokens * kKeyPitch];
};

// With a gate per head the triangles replace the operands.
union PrepareMatrices {
  PrepareOperands operands;
  PrepareTriangles triangles;
};
struct PrepareMatricesApart {
  PrepareOperands operands;
  PrepareTriangles triangles;
};
template <bool kApart>
struct SelectMatrices {
  using Type = PrepareMatrices;
};
template <>
struct SelectMatrices<true> {
  using Type = PrepareMatricesApart;
};

struct alignas(16) PrepareShared {
  SelectMatrices<kHasChannelGate>::Type matrices;
  float diagonal[kBlocks][kBlock * kDiagonalPitch];  // blocks of A, then of the inverse
  // Of each token: c in log2 units, beta, 1 / |k|, scale / |q|; the last three end with zeros.
  float log_decay[kChunkTokens], beta[kChunkTokens];
  float k_factor[kChunkTokens], q_factor[kChunkTokens];
  // With a gate per channel: c of each token and channel.
  float channel_decay[kHasChannelGate ? kChunkTokens * kChannelPitch : 4];
};
