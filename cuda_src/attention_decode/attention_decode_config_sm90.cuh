// Configuration of attention_decode_sm90: parameters, and a CTA's threads, registers and shared
// memory.
//
// Macros: the attributes of HopperTile in engine/kernels/attention_decode/sm90.py.
#pragma once

#include "common/attention_sm90.cuh"
#include "common/page_codes.cuh"

struct AttentionDecodeSm90Params {
  TensorMap k_map, v_map;      // (page rows, D / 64, kBoxKeys, 64), or (.., 1, .., D) if quantized
  const scalar_t* q;           // (B, Q, H, D); with NEW_TOKEN, before norm and rotation
  page_t *k_pages, *v_pages;   // (P, K, block_size, D), equal strides; the new token is written
  const int* block_tables;     // (B, NB) only entries within context_lens are read
  const int* context_lens;     // (B,) number of keys per sequence, including the Q new ones
  const uint64_t* tree_masks;  // (B, Q) bit j of mask i: token i sees token j <= i; or null
  const float* sinks;          // (H,) extra logit of each row's softmax; or null
  scalar_t* out;               // (B, Q, H, D)
  float* lse;                  // (B, Q, H) contiguous, or null
  float* partial_o;            // (partials, K, rows, D) sums of P V, one per split
  float* partial_stats;        // (partials, K, rows, 2) base (log2) and sum of P per split
  int* counters;               // finished splits per sequence and head; 0 between launches
  int64_t q_stride_b, q_stride_t, q_stride_h;  // in elements, like all strides
  int64_t table_stride;
  int64_t out_stride_b, out_stride_t, out_stride_h;
  int64_t max_keys;             // NB * block_size
  int batch;                    // B * token_parts
  int num_queries;              // Q / token_parts
  int num_heads, num_kv_heads;  // H, K
  int group;                    // H / K
  int block_shift, num_blocks;  // log2(block_size), P
  // Strides in page rows (PageRows in engine/kernels/_pages.py), and elements per page row.
  int page_rows, head_rows, token_rows, row_elements;
  int window;       // see RowRule
  int num_splits;   // splits per sequence; 0: shares of all key tiles
  int token_parts;  // parts into which clusters divide a sequence's query tokens, or 1
  float score_inner, score_factor;  // ScoreRule
  // Read only with NEW_TOKEN.
  const scalar_t *new_k, *new_v;        // (B, K, D) each; raw projection output, like q
  const int* positions;                 // (B,) row of cos_sin; out of range: NaN
  const float* cos_sin;                 // (num_positions, D) cosines, then sines
  const int64_t* slot_mapping;          // (B,) slot of key and value; if out of range, not stored
  const scalar_t *q_weight, *k_weight;  // (D,) norm weights; null: no norm
  int64_t k_stride_b, k_stride_h, v_stride_b, v_stride_h;
  int num_positions;
  float eps, weight_offset;
  const float *k_scale, *v_scale;  // (K,) scales of quantized pages, or null
  // Written with QUANTIZES_OUT, in place of out.
  unsigned char* codes;  // (B, Q, H, D) e4m3
  float* scales;         // (B, Q, H)
};

// ---- tiles -------------------------------------------------------------------------------------

constexpr int kHeadDim = HEAD_DIM, kBoxKeys = BOX_KEYS, kStages = STAGES;
constexpr int kRowTiles = ROW_TILES, kConsumerWarps = CONSUMER_WARPS;
constexpr int kCluster = CLUSTER, kCtasPerSm = CTAS_PER_SM;
constexpr bool kNewToken = NEW_TOKEN;
#ifdef QUANTIZES_OUT
constexpr bool kQuantizesOut = true;  // the result has one scale per row
#else
constexpr bool kQuantizesOut = false;
#endif

constexpr int kRows = kRowTiles * 16;
constexpr int kRowBytes = kHeadDim * 2;                   // bytes per row of Q
constexpr int kPageRowBytes = kHeadDim * sizeof(page_t);  // bytes per row of K or V
// Persistent CTAs load swizzled tiles by TMA. Clusters, whose launches are short, copy without a
// tensor map to avoid the latency of fetching it; such copies are slower in memory-bound launches,
// and need a box's tokens next to each other.
constexpr bool kSwizzled = kCluster == 1 || STRIDED_TOKENS;
constexpr int kBoxBytes = kBoxKeys * kPageRowBytes;
constexpr int kBoxPitch = kBoxBytes + (kSwizzled ? 0 : 16);  // see tile_offset
constexpr int kTileKeys = 8 * kBoxKeys;
constexpr int kTileBytes = 8 * kBoxPitch;
constexpr int kSplitCost = 256 / kTileKeys;  // cost of splitting a sequence, in key tiles
static_assert(kHeadDim % 64 == 0 && kBoxKeys % 8 == 0, "see tile_offset");
static_assert(!kNewToken || kRowTiles == 1, "all rows are one token's");
static_assert(!kQuantizesOut || (kHeadDim == 128 && kCluster == 1 && !kHasCodes),
              "a scale has 128 columns, and a CTA all of them");
static_assert(!kHasCodes || (kRowTiles == 1 && kHeadDim <= 128),
              "see attention_decode_codes_sm90.cuh");

// ---- warps and registers -----------------------------------------------------------------------

constexpr int kConsumerThreads = kConsumerWarps * kWarpSize;  // the producer warp follows
// If a CTA processes many sequences, three new-token warps compute the new tokens' rows of upcoming
// work tiles. Otherwise the consumer warps compute them, with shorter latency.
constexpr bool kHasNewTokenWarps = kNewToken && kCtasPerSm > 1 && kCluster == 1;
constexpr int kNewTokenThreads = 3 * kWarpSize;
// With nine warps in one CTA, or five in each of two CTAs, a thread has 168 registers: too few for
// these consumers. The producer warp is then in its own warpgroup, which releases registers to the
// consumers (fewer if its other warps have work).
constexpr bool kMovesRegisters =
    (kConsumerWarps == 8 || kNewToken || (kHasCodes && kCtasPerSm == 2)) && kCluster == 1;
constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 4 : 1) * kWarpSize;
constexpr int kConsumerRegisters = kConsumerWarps == 8 ? 232 : kHasNewTokenWarps ? 160 : 208;
constexpr int kProducerRegisters = kHasNewTokenWarps ? 96 : 40;
// SAFETY: setmaxnreg deadlocks if the launch has fewer registers left than it requests.
static_assert(!kHasNewTokenWarps ||
                  (kConsumerWarps == 4 && kConsumerRegisters + kProducerRegisters <= 2 * 128),
              "two CTAs of eight warps have 128 registers a thread");
static_assert(kConsumerWarps != 8 || 2 * kConsumerRegisters + kProducerRegisters <= 3 * 168,
              "a CTA of twelve warps has 168 registers a thread");

// ---- shared memory: byte offsets ---------------------------------------------------------------
//
//   K stages | V stages | P x 2 | maxima x 2 | sums | mbarriers | Q x kQueryBuffers | flag |
//   warp schedules | new key, value, position x kQueryBuffers | inbound partials | their mbarrier

// Ring: K of all stages, then V of all stages.
constexpr int kProbsAt = 2 * kStages * kTileBytes;
// Two buffers of P. The pitch has 16 bytes of padding, so ldmatrix has no bank conflicts.
constexpr int kProbPitch = kTileKeys * 2 + 16;
constexpr int kProbBytes = kRows * kProbPitch;
// Maxima (two buffers) and sums (one) that consumer warps exchange: one float per row and warp.
constexpr int kMaximaAt = kProbsAt + 2 * kProbBytes;
constexpr int kExchangeBytes = kRows * kConsumerWarps * 4;
constexpr int kSumsAt = kMaximaAt + 2 * kExchangeBytes;
// mbarriers of the ring and of the Q buffers.
constexpr int kBarriersAt = kSumsAt + kExchangeBytes;
constexpr bool kQueriesInRegisters = kRowTiles * kHeadDim <= 256;  // else: in shared memory
constexpr int kQueryBuffers = kQueriesInRegisters && !kHasNewTokenWarps ? 1 : 2;
static_assert(!kNewToken || kHasNewTokenWarps || kQueriesInRegisters,
              "consumers that compute the new token have one buffer of Q");
constexpr int kQueriesAt = kBarriersAt + (4 * kStages + 2 * kQueryBuffers) * 8;
constexpr int kQueryPitch = kRowBytes + 16;
constexpr int kQueryBytes = kRows * kQueryPitch;
constexpr int kFlagAt = kQueriesAt + kQueryBuffers * kQueryBytes;
// One WarpSchedule per warp except the producer warp.
constexpr int kScheduleAt = kFlagAt + 16, kScheduleBytes = 64;
constexpr int kScheduledWarps =
    kConsumerWarps + (kHasNewTokenWarps ? kNewTokenThreads / kWarpSize : 0);
// The new token's key, value and key index: one buffer per Q buffer.
constexpr int kNewKvAt = kScheduleAt + kScheduledWarps * kScheduleBytes;
constexpr int kNewKvBytes = 2 * kPageRowBytes + 16;
// Partials that a cluster's CTAs push to each other if they fit
// (attention_decode_cluster_sm90.cuh).
constexpr bool kPushesPartials = kCluster > 1 && kRowTiles == 1;
constexpr int kInboundAt = kNewKvAt + (kNewToken ? kQueryBuffers * kNewKvBytes : 0);
constexpr int kInboundBytes = kPushesPartials ? kRows * (kHeadDim * 4 + kCluster * 8) + 16 : 0;
constexpr int kInboundBarrierAt = kInboundAt + kInboundBytes - 16;
constexpr int kSharedBytes = kInboundAt + kInboundBytes;
static_assert(kSharedBytes == SHARED_BYTES, "HopperTile.shared_bytes computes another size");
static_assert(kSharedBytes <= (kCtasPerSm == 2 ? 113 : 227) * 1024, "more than an SM has");
