// The walk over a sequence's chunks: the updates X, the output and the state
// (gated_delta_chunk.cuh).
//
// Rows of S, features of v, do not depend on each other. So the products are transposed, with
// features as rows: a warp owns 16 features and keeps their rows of S in registers, in float, and
// the sums of each product, rounded, are the left operand of the next:
//
//   S K^T -> R = V^T - (S K^T) diag(e^c) -> X^T = R T^T -> S = e^(c_last) S + X^T (..) K
//   out^T = (S Q^T) diag(e^c) + X^T (Q K^T * D)^T
//
// Warps share only the chunk's tiles. One block per sequence, head and slice of kSlice features.
#pragma once

#include "common/pdl.cuh"
#include "gated_delta/gated_delta_products.cuh"

template <int kSlice>
struct alignas(1024) ScanStage {
  unsigned char k[kHasChannelGate ? 2 : 1][kTileBytes<kKeyDim>];  // that reads S; that is written
  unsigned char q[kTileBytes<kKeyDim>];
  unsigned char inverse[kPanelBytes], reads[kPanelBytes];
  unsigned char v[kTileBytes<kSlice>];  // then the output
  float factors[ChunkScratch::kFactors];
};

// A block's place in the problem.
template <int kSlice>
struct Scan {
  using Stage = ScanStage<kSlice>;

  const GatedDeltaParams& p;
  const int b, head, slice;  // slice: first feature of v
  const Sequence sequence;
  const ChunkRange range;

  __device__ __forceinline__ explicit Scan(const GatedDeltaParams& p)
      : p(p),
        b(blockIdx.x),
        head(blockIdx.y),
        slice(blockIdx.z * kSlice),
        sequence(load_sequence(p, b)),
        range(p, sequence, b) {}

  // Starts a thread's part of the copies of chunk number `index`; `thread` is one of kThreads.
  template <int kThreads>
  __device__ __forceinline__ void load(Stage& stage, int index, int thread) const {
    const Chunk tokens = range.chunk(index);
    const int64_t t = sequence.begin + tokens.begin;
    const ChunkScratch scratch(p, range.first_id + index, head);
    const auto copy_keys = [&](const void* tile, const scalar_t* from, int64_t stride, int count) {
      copy_tile<kKeyDim, kThreads>(smem_address(tile), from, stride, count, thread);
    };
    if constexpr (kHasChannelGate) {
      copy_keys(stage.k[0], scratch.k_reads, kKeyDim, kChunkTokens);
      copy_keys(stage.k[1], scratch.k_writes, kKeyDim, kChunkTokens);
      copy_keys(stage.q, scratch.q, kKeyDim, kChunkTokens);
    } else {
      const int key_head = head / (p.num_heads / p.num_key_heads);
      copy_keys(stage.k[0], p.k + t * p.k_stride_t + key_head * p.k_stride_h, p.k_stride_t,
                tokens.count());
      copy_keys(stage.q, p.q + t * p.q_stride_t + key_head * p.q_stride_h, p.q_stride_t,
                tokens.count());
    }
    copy_triangle<kThreads>(smem_address(stage.inverse), scratch.inverse, thread);
    copy_triangle<kThreads>(smem_address(stage.reads), scratch.reads, thread);
    copy_tile<kSlice, kThreads>(smem_address(stage.v),
                                p.v + t * p.v_stride_t + head * p.v_stride_h + slice, p.v_stride_t,
                                tokens.count(), thread);
    static_assert(ChunkScratch::kFactors % 4 == 0, "four factors per copy");
    for (int i = 4 * thread; i < ChunkScratch::kFactors; i += 4 * kThreads)
      cp_async_16(stage.factors + i, scratch.factors + i);
  }

  // The slice's part of the state in a slot, and of the state between launches.
  __device__ __forceinline__ state_t* slot(int index) const {
    const int64_t offset = (static_cast<int64_t>(head) * kValueDim + slice) * kKeyDim;
    return p.states + index * p.slot_stride + offset;
  }
  __device__ __forceinline__ float* carried(int launch) const {
    return carried_state(p, launch, head) + slice * kKeyDim;
  }
};

// A warp's 16 features: their rows of S, and their columns of a chunk's result.
template <typename Products, int kSlice>
class ScanWarp {
 public:
  using Stage = ScanStage<kSlice>;

  __device__ __forceinline__ ScanWarp() : feature_(uniform_warp_idx() * 16) {
    for_each([](int, int, float& first, float& second) { first = second = 0.0f; });
  }

  // Rows of the state, of the slice's first feature.
  template <typename T>
  __device__ __forceinline__ void load_state(const T* state) {
    for_each([&](int row, int column, float& first, float& second) {
      const auto pair = load_vec<T, 2>(state + row * kKeyDim + column);
      first = to_float(pair.v[0]);
      second = to_float(pair.v[1]);
    });
  }

  template <typename T>
  __device__ __forceinline__ void store_state(T* state) {
    for_each([&](int row, int column, float& first, float& second) {
      store_vec(state + row * kKeyDim + column,
                Vec<T, 2>{from_float<T>(first), from_float<T>(second)});
    });
  }

  // Advances S by a chunk; the output replaces the warp's features of v.
  __device__ __forceinline__ void advance(Stage& stage) {
    const float* const factors = stage.factors;
    uint32_t state[kKeySteps][4], updates[kTokenSteps][4], writes[kTokenSteps][4];
    float sums[kTokenTiles][4], out[kTokenTiles][4];
    pack_operand(state, state_);
    Products::begin();
    Products::multiply_rows(sums, state, smem_address(stage.k[0]));
    Products::commit();
    Products::multiply_rows(out, state, smem_address(stage.q));
    Products::commit();
    Products::template wait<1>(sums);
    scale(sums, factors + ChunkScratch::kKeyRows);
    subtract_from_values(sums, stage);
    pack_operand(updates, sums);
    Products::begin();
    Products::template multiply_triangle<false>(sums, updates, smem_address(stage.inverse));
    Products::commit();
    forget(factors + ChunkScratch::kDecay);
    Products::template wait<0>(sums);
    Products::template wait<0>(out);
    pack_operand(updates, sums);
    scale(sums, factors + ChunkScratch::kXRows);
    pack_operand(writes, sums);
    scale(out, factors);
    Products::begin();
    Products::multiply_columns(state_, writes, smem_address(stage.k[kHasChannelGate]));
    Products::commit();
    Products::template multiply_triangle<true>(out, updates, smem_address(stage.reads));
    Products::commit();
    Products::template wait<0>(state_);
    Products::template wait<0>(out);
    stage_output(out, stage);
  }

  // Writes the staged output to rows of `out`, whose first is that of the chunk's first token.
  __device__ __forceinline__ void store_output(scalar_t* out, int64_t stride, int count,
                                               const Stage& stage) const {
    __syncwarp();
    const int lane = lane_idx(), column = feature_ + lane % 2 * kVec;
#pragma unroll
    for (int token = 0; token < kChunkTokens; token += 16) {
      // Eight lanes read two columns of every other row, from eight different places.
      const int row = token + lane / 16 * 8 + lane / 2 % 4 * 2 + lane / 8 % 2;
      if (row >= count) continue;
      const uint32_t from = tile_address(0, row, column);
      *reinterpret_cast<uint4*>(out + row * stride + column) =
          *reinterpret_cast<const uint4*>(stage.v + from);
    }
  }

 private:
  // Calls f(row, column, element (row, column), element (row, column + 1)) for the lane's elements.
  template <typename F>
  __device__ __forceinline__ void for_each(F f) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        f(feature_ + half * 8 + lane_idx() / 4, tile * 8 + lane_idx() % 4 * 2,
          state_[tile][2 * half], state_[tile][2 * half + 1]);
  }

  // S = diag(decay) S.
  __device__ __forceinline__ void forget(const float* decay) {
    for_each([&](int, int column, float& first, float& second) {
      first *= decay[kHasChannelGate ? column : 0];
      second *= decay[kHasChannelGate ? column + 1 : 0];
    });
  }

  // Multiplies the columns, tokens, by factors. With a gate per channel q and k hold them.
  static __device__ __forceinline__ void scale(float (&sums)[kTokenTiles][4],
                                               const float* factors) {
    if constexpr (!kHasChannelGate) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        const auto pair = load_vec<float, 2>(factors + tile * 8 + lane_idx() % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][i] *= pair.v[i % 2];
      }
    }
  }

  // sums = V^T - sums.
  __device__ __forceinline__ void subtract_from_values(float (&sums)[kTokenTiles][4],
                                                       const Stage& stage) const {
    const int matrix = lane_idx() / 8;
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
      uint32_t values[4];
      ldmatrix_x4_trans(
          values, tile_address(smem_address(stage.v), step * 16 + matrix / 2 * 8 + lane_idx() % 8,
                               feature_ + matrix % 2 * 8));
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const auto pair = reinterpret_cast<const Vec<scalar_t, 2>&>(values[part]);
        float* const sum = sums[2 * step + part / 2] + part % 2 * 2;
        sum[0] = to_float(pair.v[0]) - sum[0];
        sum[1] = to_float(pair.v[1]) - sum[1];
      }
    }
  }

  __device__ __forceinline__ void stage_output(const float (&out)[kTokenTiles][4], Stage& stage) {
    uint32_t packed[kTokenSteps][4];
    pack_operand(packed, out);
    __syncwarp();  // SAFETY: all lanes have read v, which the output replaces.
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step)
      Products::store_transposed(stage.v, step * 16, feature_, packed[step]);
  }

  const int feature_;  // the warp's first, in the slice
  float state_[kKeyTiles][4];
};

// A warp's walk: its state, and where states and outputs are written.
template <typename Products, int kSlice>
class ScanWalk {
 public:
  __device__ __forceinline__ explicit ScanWalk(const Scan<kSlice>& scan) : scan_(scan) {
    const GatedDeltaParams& p = scan.p;
    const int num_tokens = scan.sequence.num_tokens();
    target_ = target_slot(p, scan.b, num_tokens, num_tokens);
    snapshot_end_ = p.snapshot_slots != nullptr ? p.snapshot_offsets[scan.b] : -1;
    snapshot_ = snapshot_slot(p, scan.b, snapshot_end_);
    if (scan.range.begin > 0) {
      warp_.load_state(scan.carried(p.launch - 1));
    } else if (scan.sequence.first_slot >= 0) {
      warp_.load_state(scan.slot(scan.sequence.first_slot));
    }
  }

  // Advances by chunk number `index`, whose stage is complete.
  __device__ __forceinline__ void advance(ScanStage<kSlice>& stage, int index) {
    const GatedDeltaParams& p = scan_.p;
    const Chunk tokens = scan_.range.chunk(index);
    warp_.advance(stage);
    const int64_t row = static_cast<int64_t>(scan_.sequence.begin + tokens.begin) * p.num_heads;
    warp_.store_output(p.out + (row + scan_.head) * kValueDim + scan_.slice,
                       static_cast<int64_t>(p.num_heads) * kValueDim, tokens.count(), stage);
    if (tokens.end == scan_.sequence.num_tokens() && target_ >= 0)
      warp_.store_state(scan_.slot(target_));
    if (tokens.end == snapshot_end_ && snapshot_ >= 0) warp_.store_state(scan_.slot(snapshot_));
  }

  // Leaves the state for the next launch, if the sequence goes on.
  __device__ __forceinline__ void end() {
    if (scan_.range.end < scan_.range.num_chunks) warp_.store_state(scan_.carried(scan_.p.launch));
  }

 private:
  const Scan<kSlice>& scan_;
  ScanWarp<Products, kSlice> warp_;
  int target_, snapshot_, snapshot_end_;
};

// SAFETY: a barrier per chunk. Before it a chunk's copies have landed, and the warps have finished
// the chunk before, whose stage is then refilled. With one stage a second barrier precedes the
// copies.
template <int kSlice, int kStages>
__device__ __forceinline__ void scan_chunks(const GatedDeltaParams& p, unsigned char* smem) {
  constexpr int kThreads = 2 * kSlice;  // a warp per 16 features
  pdl_trigger();
  pdl_wait();
  const Scan<kSlice> scan(p);
  const int end = scan.range.end;
  if (scan.range.begin >= end) return;
  auto* const stages = reinterpret_cast<ScanStage<kSlice>*>(smem);
  const auto load = [&](int index) {
    if (index < end) scan.template load<kThreads>(stages[index % kStages], index, threadIdx.x);
    cp_async_commit();  // even if empty: the wait counts groups
  };
  constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;  // chunks in flight
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(scan.range.begin + i);
  ScanWalk<MmaProducts, kSlice> walk(scan);
#pragma unroll 1
  for (int index = scan.range.begin; index < end; ++index) {
    cp_async_wait<kAhead - 1>();
    __syncthreads();
    if (kStages > 1) load(index + kAhead);
    walk.advance(stages[index % kStages], index);
    if (kStages == 1) {
      __syncthreads();
      load(index + 1);
    }
  }
  walk.end();
}
