// A stage of dense weights: rows of scalar_t as written by TMA, read directly by wgmma.
#pragma once

constexpr int kMmaBytes = kMmaM * kSlabRowBytes;  // bytes of an m-tile of a slab
constexpr int kSlabW = kPartsW * kMmaBytes;
constexpr int kStageW = kDepth * kSlabW;
