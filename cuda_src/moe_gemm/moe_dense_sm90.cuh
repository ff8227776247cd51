// A stage of dense weights: rows of scalar_t as TMA writes them, which wgmma reads from there.
#pragma once

constexpr int kMmaBytes = kMmaM * kSlabRowBytes;  // of an m-tile of a slab
constexpr int kSlabW = kPartsW * kMmaBytes;
constexpr int kStageW = kDepth * kSlabW;
