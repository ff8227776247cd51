// A stage of dense weights: rows of scalar_t, written by TMA and read directly by wgmma.
#pragma once

constexpr int kMmaBytes = kMmaM * kSlabRowBytes;  // bytes per m-tile of a slab
constexpr int kSlabW = kPartsW * kMmaBytes;
constexpr int kStageW = kDepth * kSlabW;
