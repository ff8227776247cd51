// The walk over a sequence's chunks: the updates X, the output and the state
// (gated_delta_chunk.cuh).
//
// One block per sequence, head and slice of kSlice rows of the state (features of v). Four warps
// own the state: they compute X = U - W S^T and then the new state, which stays in their
// accumulators, in float. Four warps own the output: Q S^T, then + reads X. Both products of the
// first half read the rounded copy of the old state in shared memory, both of the second half X.
#pragma once

#include "common/cp_async.cuh"
#include "common/pdl.cuh"
#include "gated_delta/gated_delta_chunk.cuh"
#include "gated_delta/gated_delta_fragments.cuh"

constexpr int kScanThreads = 256;

template <int kSlice>
struct ScanStage {
  static constexpr int kSlicePitch = kSlice + kPad;

  scalar_t w[kChunkTokens * kKeyPitch], q[kChunkTokens * kKeyPitch], k[kChunkTokens * kKeyPitch];
  scalar_t reads[kChunkTokens * kTokenPitch];
  scalar_t u[kChunkTokens * kSlicePitch];
  float factors[ChunkScratch::kFactors];
};

// What the warps of a block pass to each other within a chunk.
template <int kSlice>
struct ScanChunk {
  static constexpr int kSlicePitch = kSlice + kPad;
  scalar_t state[kSlice * kKeyPitch];             // S before the chunk, rounded
  scalar_t x[kChunkTokens * kSlicePitch];         // X
  scalar_t scaled_x[kChunkTokens * kSlicePitch];  // X times the rows' factors
};

template <int kSlice, int kStages>
struct ScanShared : ScanChunk<kSlice> {
  ScanStage<kSlice> stages[kStages];
};

// A block's place in the problem.
template <int kSlice>
struct Scan {
  static constexpr int kSlicePitch = kSlice + kPad;
  using Stage = ScanStage<kSlice>;

  const GatedDeltaParams& p;
  ScanChunk<kSlice>& smem;
  const Sequence sequence;
  const ChunkRange range;
  const int head, key_head, slice;  // slice: first feature of v
  const int warp_idx;               // of the four warps with the same task

  // Starts the copies of chunk number `index`; always commits a group.
  __device__ __forceinline__ void load(Stage& stage, int index) const {
    if (index < range.end) {
      const Chunk tokens = range.chunk(index);
      const ChunkScratch scratch(p, range.first_id + index, head);
      copy<kKeyDim>(stage.w, kKeyPitch, scratch.w, kKeyDim, kChunkTokens);
      copy<kSlice>(stage.u, kSlicePitch, scratch.u + slice, kValueDim, kChunkTokens);
      copy<kChunkTokens>(stage.reads, kTokenPitch, scratch.reads, kChunkTokens, kChunkTokens);
      static_assert(ChunkScratch::kFactors <= 4 * kScanThreads && ChunkScratch::kFactors % 4 == 0,
                    "four factors per thread");
      const int i = 4 * threadIdx.x;
      if (i < ChunkScratch::kFactors) cp_async_16(stage.factors + i, scratch.factors + i);
      if constexpr (kHasChannelGate) {
        copy<kKeyDim>(stage.q, kKeyPitch, scratch.q, kKeyDim, kChunkTokens);
        copy<kKeyDim>(stage.k, kKeyPitch, scratch.k, kKeyDim, kChunkTokens);
      } else {
        const int64_t t = sequence.begin + tokens.begin;
        copy<kKeyDim>(stage.q, kKeyPitch, p.q + t * p.q_stride_t + key_head * p.q_stride_h,
                      p.q_stride_t, tokens.count());
        copy<kKeyDim>(stage.k, kKeyPitch, p.k + t * p.k_stride_t + key_head * p.k_stride_h,
                      p.k_stride_t, tokens.count());
      }
    }
    cp_async_commit();
  }

  template <int kColumns>
  __device__ __forceinline__ void copy(scalar_t* smem, int pitch, const scalar_t* gmem,
                                       int64_t stride, int count) const {
    copy_rows<kChunkTokens, kColumns, kScanThreads>(smem, pitch, gmem, stride, count);
  }

  // sums = the warp's 16 rows of A S^T.
  __device__ __forceinline__ void multiply_by_state(float (&sums)[kSlice / 8][4],
                                                    const scalar_t* smem_a) const {
#pragma unroll
    for (auto& tile : sums)
#pragma unroll
      for (float& sum : tile) sum = 0.0f;
#pragma unroll
    for (int d = 0; d < kKeyDim; d += 16) {
      uint32_t a[4];
      load_a(a, smem_a, kKeyPitch, warp_idx * 16, d);
#pragma unroll
      for (int n = 0; n < kSlice; n += 16) {
        uint32_t columns[4];
        load_b(columns, smem.state, kKeyPitch, n, d);
        multiply(sums[n / 8], sums[n / 8 + 1], a, columns);
      }
    }
  }
};

// Factors of the lane's rows i and i + 8; 1 with a gate per channel, where q and k hold them.
struct RowFactors {
  float row[2] = {1.0f, 1.0f};

  __device__ __forceinline__ RowFactors(const float* rows, int i) {
    if constexpr (!kHasChannelGate) {
      row[0] = rows[i];
      row[1] = rows[i + 8];
    }
  }
};

// The state's slice in the accumulators of the four warps that own it: rows are features of v,
// columns those of k. Warp w holds the blocks of 16 columns w, w + 4, ...
template <int kSlice>
class ScannedState {
 public:
  using Stage = ScanStage<kSlice>;

  __device__ __forceinline__ explicit ScannedState(const Scan<kSlice>& scan) : scan_(scan) {
    for_each([](int, int, float& first, float& second) { first = second = 0.0f; });
  }

  template <typename T>
  __device__ __forceinline__ void load(const T* state) {
    for_each([&](int row, int column, float& first, float& second) {
      const auto pair = load_vec<T, 2>(state + row * kKeyDim + column);
      first = to_float(pair.v[0]);
      second = to_float(pair.v[1]);
    });
  }

  template <typename T>
  __device__ __forceinline__ void store(T* state) {
    for_each([&](int row, int column, float& first, float& second) {
      store_vec(state + row * kKeyDim + column,
                Vec<T, 2>{from_float<T>(first), from_float<T>(second)});
    });
  }

  // Rounds the state to the copy in shared memory that the products read.
  __device__ __forceinline__ void publish() {
    for_each([&](int row, int column, float& first, float& second) {
      *reinterpret_cast<uint32_t*>(scan_.smem.state + row * kKeyPitch + column) =
          pack2<scalar_t>(first, second);
    });
  }

  // X = U - W S^T for the warp's 16 tokens.
  __device__ __forceinline__ void compute_x(const Stage& stage) {
    const int row = scan_.warp_idx * 16 + lane_idx() / 4;
    const RowFactors factors(stage.factors + ChunkScratch::kXRows, row);
    float sums[kSlice / 8][4];
    scan_.multiply_by_state(sums, stage.w);
#pragma unroll
    for (int tile = 0; tile < kSlice / 8; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = (row + half * 8) * kSlicePitch + tile * 8 + lane_idx() % 4 * 2;
        const auto u = load_vec<scalar_t, 2>(stage.u + at);
        const float first = to_float(u.v[0]) - sums[tile][2 * half];
        const float second = to_float(u.v[1]) - sums[tile][2 * half + 1];
        *reinterpret_cast<uint32_t*>(scan_.smem.x + at) = pack2<scalar_t>(first, second);
        *reinterpret_cast<uint32_t*>(scan_.smem.scaled_x + at) =
            pack2<scalar_t>(first * factors.row[half], second * factors.row[half]);
      }
  }

  // S = decay S + X^T diag(x_rows) K.
  __device__ __forceinline__ void update(const Stage& stage) {
    const float* const decay = stage.factors + ChunkScratch::kDecay;
    for_each([&](int, int column, float& first, float& second) {
      first *= decay[kHasChannelGate ? column : 0];
      second *= decay[kHasChannelGate ? column + 1 : 0];
    });
#pragma unroll
    for (int t = 0; t < kChunkTokens; t += 16) {
      uint32_t a[kSlice / 16][4];
#pragma unroll
      for (int m = 0; m < kSlice / 16; ++m)
        load_a_trans(a[m], scan_.smem.scaled_x, kSlicePitch, m * 16, t);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (block(i) >= kKeyDim / 16) break;
        uint32_t b[4];
        load_b_trans(b, stage.k, kKeyPitch, block(i) * 16, t);
#pragma unroll
        for (int m = 0; m < kSlice / 16; ++m) multiply(sums_[m][i][0], sums_[m][i][1], a[m], b);
      }
    }
  }

 private:
  static constexpr int kSlicePitch = kSlice + kPad;
  static constexpr int kBlocks = (kKeyDim / 16 + 3) / 4;

  __device__ __forceinline__ int block(int i) const { return scan_.warp_idx + 4 * i; }

  // Calls f(row, column, element (row, column), element (row, column + 1)).
  template <typename F>
  __device__ __forceinline__ void for_each(F f) {
#pragma unroll
    for (int m = 0; m < kSlice / 16; ++m)
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (block(i) >= kKeyDim / 16) break;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            f(m * 16 + half * 8 + lane_idx() / 4, block(i) * 16 + tile * 8 + lane_idx() % 4 * 2,
              sums_[m][i][tile][2 * half], sums_[m][i][tile][2 * half + 1]);
      }
  }

  const Scan<kSlice>& scan_;
  float sums_[kSlice / 16][kBlocks][2][4];
};

// The output of the warp's 16 tokens, in accumulators.
template <int kSlice>
class ScannedOutput {
 public:
  using Stage = ScanStage<kSlice>;

  __device__ __forceinline__ explicit ScannedOutput(const Scan<kSlice>& scan) : scan_(scan) {}

  // diag(out_rows) Q S^T.
  __device__ __forceinline__ void read_state(const Stage& stage) {
    const RowFactors factors(stage.factors, scan_.warp_idx * 16 + lane_idx() / 4);
    scan_.multiply_by_state(sums_, stage.q);
#pragma unroll
    for (auto& tile : sums_)
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[i] *= factors.row[i / 2];
  }

  // + reads X; `reads` is lower triangular.
  __device__ __forceinline__ void read_updates(const Stage& stage) {
#pragma unroll
    for (int block = 0; block < kChunkTokens / 16; ++block) {
      if (block > scan_.warp_idx) break;
      uint32_t a[4];
      load_a(a, stage.reads, kTokenPitch, scan_.warp_idx * 16, block * 16);
#pragma unroll
      for (int n = 0; n < kSlice; n += 16) {
        uint32_t b[4];
        load_b_trans(b, scan_.smem.x, Stage::kSlicePitch, n, block * 16);
        multiply(sums_[n / 8], sums_[n / 8 + 1], a, b);
      }
    }
  }

  __device__ __forceinline__ void store(const Chunk& tokens) const {
    const GatedDeltaParams& p = scan_.p;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = scan_.warp_idx * 16 + half * 8 + lane_idx() / 4;
      if (row >= tokens.count()) continue;
      const int64_t t = scan_.sequence.begin + tokens.begin + row;
      scalar_t* const out = p.out + (t * p.num_heads + scan_.head) * kValueDim + scan_.slice;
#pragma unroll
      for (int tile = 0; tile < kSlice / 8; ++tile)
        *reinterpret_cast<uint32_t*>(out + tile * 8 + lane_idx() % 4 * 2) =
            pack2<scalar_t>(sums_[tile][2 * half], sums_[tile][2 * half + 1]);
    }
  }

 private:
  const Scan<kSlice>& scan_;
  float sums_[kSlice / 8][4];
};

// SAFETY: two barriers per chunk. Before the first, the chunk's copies have landed and the state is
// published; the warps are done with the other stage. Before the second, X is complete and nobody
// reads the state any more. With one stage a third barrier precedes the next copies.
template <int kSlice, int kStages>
__device__ __forceinline__ void scan_chunks(const GatedDeltaParams& p,
                                            ScanShared<kSlice, kStages>& smem) {
  pdl_trigger();
  pdl_wait();
  const int b = blockIdx.x, head = blockIdx.y, slice = blockIdx.z * kSlice;
  const Sequence sequence = load_sequence(p, b);
  const ChunkRange range(p, sequence, b);
  if (range.begin >= range.end) return;
  const int warp_idx = uniform_warp_idx();
  const Scan<kSlice> scan{
      p, smem, sequence, range, head, head / (p.num_heads / p.num_key_heads), slice, warp_idx % 4};
  const bool owns_state = warp_idx < 4;
  const int64_t offset = (static_cast<int64_t>(head) * kValueDim + slice) * kKeyDim;
  const auto slot = [&](int index) { return p.states + index * p.slot_stride + offset; };
  const int num_tokens = sequence.num_tokens();
  const int target = target_slot(p, b, num_tokens, num_tokens);
  const int snapshot_end = p.snapshot_slots != nullptr ? p.snapshot_offsets[b] : -1;
  const int snapshot = snapshot_slot(p, b, snapshot_end);

  ScannedState<kSlice> state(scan);
  ScannedOutput<kSlice> output(scan);
  scan.load(smem.stages[range.begin % kStages], range.begin);
  if (owns_state) {
    if (range.begin > 0) {
      state.load(carried_state(p, p.launch - 1, head) + slice * kKeyDim);
    } else if (sequence.first_slot >= 0) {
      state.load(slot(sequence.first_slot));
    }
    state.publish();
  }
#pragma unroll 1
  for (int index = range.begin; index < range.end; ++index) {
    const ScanStage<kSlice>& stage = smem.stages[index % kStages];
    const Chunk tokens = range.chunk(index);
    cp_async_wait<0>();
    __syncthreads();
    if (kStages > 1) scan.load(smem.stages[(index + 1) % kStages], index + 1);
    if (owns_state) {
      state.compute_x(stage);
    } else {
      output.read_state(stage);
    }
    __syncthreads();
    if (owns_state) {
      state.update(stage);
      state.publish();
      if (tokens.end == num_tokens && target >= 0) state.store(slot(target));
      if (tokens.end == snapshot_end && snapshot >= 0) state.store(slot(snapshot));
    } else {
      output.read_updates(stage);
      output.store(tokens);
    }
    if (kStages == 1) {
      __syncthreads();
      scan.load(smem.stages[0], index + 1);
    }
  }
  if (owns_state && range.end < range.num_chunks)
    state.store(carried_state(p, p.launch, head) + slice * kKeyDim);
}
