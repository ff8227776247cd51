// Work tile of a module of moe_gemm_sm90.cu, set by -D (MoeTileConfig in
// engine/kernels/moe_gemm/sm90.py), and the constants derived from it.
#pragma once

#include "common/reduce.cuh"  // kWarpSize
#include "common/sm90.cuh"
#include "common/wgmma.cuh"

constexpr int kWarpgroups = WARPGROUPS;  // consumer warpgroups
// A warpgroup has two m-tiles: the same 64 rows of gate and of up, or 128 consecutive rows. With
// MMA_TILES 1 it has one, of packed weights: 64 consecutive rows or, in a gated product, four row
// tiles that each hold 8 rows of gate (a warp's rows g) and the same 8 of up (rows g + 8).
constexpr int kMmaTiles = MMA_TILES;
constexpr bool kMixesRows = kMmaTiles == 1;
constexpr int kTokens = TOKENS;  // maximum rows of x per tile
constexpr int kDepth = DEPTH;    // slabs per stage
constexpr int kStages = STAGES;
constexpr int kBlocks = BLOCKS;  // CTAs per multiprocessor
constexpr int kMaxExperts = 512;
constexpr int kMmaM = 64;  // rows of an m-tile: one wgmma
#if WEIGHT_KIND == 3
using operand_t = unsigned char;  // type of x
#else
using operand_t = scalar_t;
#endif
constexpr int kSlabK = 128 / sizeof(operand_t);  // values of k per slab, for the widest swizzle
constexpr int kSlabRowBytes = 128;
constexpr int kBoxRows = BOX_ROWS;  // sorted rows of x per TMA box
constexpr int kConsumerThreads = kWarpgroups * 128;
constexpr int kProducerThreads = 128;
constexpr int kThreads = kConsumerThreads + kProducerThreads;
constexpr bool kMovesRegisters = kWarpgroups > 1 || kBlocks > 1;
// Registers per thread. Their total must not exceed the launch's (168 per thread with three
// warpgroups, else 128): requesting more would deadlock. With 200 for the consumers of kMixesRows
// ptxas would make each wgmma wait for the previous one.
constexpr bool kSparesProducer = WEIGHT_KIND % 2 == 0 || kMixesRows;
constexpr int kProducerRegisters = kWarpgroups == 3                 ? 80
                                   : kBlocks > 1 || kSparesProducer ? 88
                                                                    : 104;
constexpr int kConsumerRegisters = kWarpgroups == 3  ? 144
                                   : kBlocks > 1     ? 168
                                   : kSparesProducer ? 208
                                                     : 200;
static_assert(!kMovesRegisters || kConsumerRegisters * kWarpgroups + kProducerRegisters <=
                                      (kWarpgroups == 2 ? 168 * 3 : 128 * (kWarpgroups + 1)),
              "registers");

constexpr int kPartsW = kWarpgroups * kMmaTiles;  // m-tiles per weight tile
static_assert(!kMixesRows || (WEIGHT_KIND == 1 && kPartsW == 2), "an m-tile of gate and one of up");
constexpr int kSlabX = kTokens * kSlabRowBytes, kStageX = kDepth * kSlabX;
// Values of WEIGHT_KIND, which the preprocessor compares.
enum MoeWeightKind { kDense = 0, kPacked = 1, kBytes = 2, kCodes = 3 };
#if WEIGHT_KIND == 0
#include "moe_gemm/moe_dense_sm90.cuh"
#elif WEIGHT_KIND == 1
#include "moe_gemm/moe_packed_sm90.cuh"
#elif WEIGHT_KIND == 2
#include "moe_gemm/moe_bytes_sm90.cuh"
#else
#include "moe_gemm/moe_codes_sm90.cuh"
#endif
#if WEIGHT_KIND == 3
// Results are e4m3 codes with a scale per 128 features of a row, for a product of codes.
constexpr bool kQuantizesOut = QUANTIZES_OUT;
static_assert(!kQuantizesOut || kWarpgroups * kMmaM == 128, "a tile has 128 features and a gate");
#else
constexpr bool kQuantizesOut = false;
constexpr int kStageScales = 4;  // none are stored outside the stage, but arrays need a size

struct MoeRowScales {  // rows of x have no scales
  template <typename Params>
  __device__ __forceinline__ explicit MoeRowScales(const Params&) {}
  __device__ __forceinline__ void begin(int) const {}
  __device__ __forceinline__ void load(float*, int) const {}
};
#endif
// Staging of a warpgroup's results: one row of 64 features per token.
constexpr int kStagingTokens = kTokens < 64 ? kTokens : 64;
constexpr int kStaging = kStagingTokens * kMmaM * 2;
static_assert(kTokens % kBoxRows == 0 && kTokens % 16 == 0, "sorted rows of x come in whole boxes");

struct MoeTile {
  int expert;
  int first, count;  // first index in the sorted order; number of pairs
  int row;           // first row of the weight, or of its gate half
};

// A tile's record, written by the producer for the consumers.
struct MoeTileRecord {
  MoeTile tile;
  int rows[kTokens];       // rows of out, if results are scattered
  float weights[kTokens];  // weights of these pairs

  // With kQuantizesOut: the largest magnitude among a warpgroup's 64 features, by token. Results
  // are not scattered then, so rows and weights are unused.
  __device__ __forceinline__ float* peaks(int warpgroup) {
    return warpgroup == 0 ? reinterpret_cast<float*>(rows) : weights;
  }
};
constexpr int kRecords = 2;
constexpr int kRecordWriters = kProducerThreads - kWarpSize;  // all but the copying warp

// Dynamic shared memory, aligned to the swizzle's atoms.
struct MoeShared {
  unsigned char w[kStages][kStageW];
  unsigned char x[kStages][kStageX];
  unsigned char staging[kWarpgroups][kStaging];
  float scales[kStages][kStageScales];
  MoeTileRecord records[kRecords];
  uint64_t full[kStages], empty[kStages];
  uint64_t record_full[kRecords], record_empty[kRecords];
  int offsets[kMaxExperts + 1];
  int tiles[kMaxExperts + 1];  // number of tiles of the preceding experts
};
static_assert(kThreads == THREADS && sizeof(MoeShared) + 1024 <= SHARED_BYTES,
              "MoeTileConfig in moe_gemm/sm90.py computes other sizes");
