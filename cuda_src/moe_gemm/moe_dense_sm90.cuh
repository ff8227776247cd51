// A stage of dense weights: rows of scalar_t, written by TMA and read directly by wgmma. An m-tile
// of a slab is 64 rows of the matrix by 64 values of k. Its rows in shared memory lie along k or,
// with kTransposed, hold the 64 matrix rows of one k.
#pragma once

constexpr bool kTransposed = TRANSPOSED != 0;     // the weight is (E, K, R)
constexpr int kMmaBytes = kMmaM * kSlabRowBytes;  // bytes per m-tile of a slab
constexpr int kSlabW = kPartsW * kMmaBytes;
constexpr int kStageW = kDepth * kSlabW;
