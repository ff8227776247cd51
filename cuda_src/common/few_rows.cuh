// Shared by the skinny GEMM kernels, which stream a weight for few rows of x: the wait on a warp's
// ring, and the layout of its sums.
#pragma once

#include "common/cp_async.cuh"

constexpr int kMaxStages = 6;  // maximum number of stages of a ring

// Waits until the oldest stage of the ring has arrived. Each stage is one cp.async group, and all
// num_stages groups have been committed.
__device__ __forceinline__ void wait_for_oldest(int num_stages) {
  static_assert(kMaxStages == 6, "a case each");
  if (num_stages == 3)
    cp_async_wait<2>();
  else if (num_stages == 2)
    cp_async_wait<1>();
  else if (num_stages == 4)
    cp_async_wait<3>();
  else if (num_stages == 6)
    cp_async_wait<5>();
  else if (num_stages == 5)
    cp_async_wait<4>();
  else
    cp_async_wait<0>();
}

// Layout of a row tile's sums (16 rows of the weight): [token][row].
template <int kTokens_>
struct FewRowsShape {
  static constexpr int kTokens = kTokens_, kTokenTiles = (kTokens + 7) / 8;
  static constexpr int kPitch = 16 + 4;                // 2 * kPitch is 8 mod 32: no bank conflicts
  static constexpr int kSumFloats = kTokens * kPitch;  // floats per warp
};
