// Consumer warps: the output of a chunk, and the state after it (mamba2_chunk.cuh).
//
// A warp owns 16 kTiles rows of a head's state, all columns, in accumulators. Rounded, they are
// the second operand of C S^T as they are: so the state never passes through shared memory.
#pragma once

#include "mamba2/mamba2_chunk.cuh"

// Two values of scalar_t, times a factor each.
__device__ __forceinline__ uint32_t scale2(uint32_t pair, const Vec<float, 2>& factor) {
  const auto& x = reinterpret_cast<const Vec<scalar_t, 2>&>(pair);
  return pack2<scalar_t>(to_float(x.v[0]) * factor.v[0], to_float(x.v[1]) * factor.v[1]);
}

class ChunkConsumer {
 public:
  __device__ __forceinline__ ChunkConsumer(const ChunkBlock& block, int warp_idx)
      : block_(block),
        p_(block.p),
        head_(warp_idx / kHeadWarps),
        first_row_(warp_idx % kHeadWarps * kWarpRows),
        skip_(block.p.d[block.head + warp_idx / kHeadWarps]) {
    for_each([](int, float& first, float& second) { first = second = 0.0f; });
  }

  // The consumer's head in the block.
  __device__ __forceinline__ int head() const { return head_; }

  __device__ __forceinline__ void load(int slot) {
    if (slot < 0) return;
    const state_t* const state = lane_state(slot);
    for_each([&](int at, float& first, float& second) {
      const auto pair = load_vec<state_t, 2>(state + at);
      first = to_float(pair.v[0]);
      second = to_float(pair.v[1]);
    });
  }

  __device__ __forceinline__ void store(int slot) {
    if (slot < 0) return;
    state_t* const state = lane_state(slot);
    for_each([&](int at, float& first, float& second) {
      store_vec(state + at,
                Vec<state_t, 2>{from_float<state_t>(first), from_float<state_t>(second)});
    });
  }

  // Computes the output of a chunk's tokens, and the state after it.
  __device__ __forceinline__ void consume(const ChunkStage& stage, const scalar_t* mix,
                                          const ChunkFactors& factors, const Chunk& tokens) {
    const scalar_t* const x = stage.x[head_] + first_row_;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int first = pass * kTokenTiles;
      float out[kTokenTiles][kTiles][2][4] = {};
      if (kPasses > 1) hide();
      read_state(out, stage.c + first * 16 * kStatePitch);
      scale_rows(out, factors.read + first * 16);
      mix_tokens(out, mix + first * 16 * kTokenPitch, x, first);
      store_output(out, x + first * 16 * kRowPitch, tokens, first * 16);
    }
    update(stage.b, x, factors);
  }

 private:
  // Tokens are computed in passes: beside two tiles of the state, registers have no room for the
  // accumulators of all tokens. Two passes are faster, where they do not spill.
  static constexpr bool kFitsTwo =
      kArch == 900 && (ENGINE_DTYPE == 2 || sizeof(state_t) == 4 || kRows == 128);
  static constexpr int kPasses = kTiles == 1 ? 1 : kFitsTwo ? 2 : 4;
  static constexpr int kTokenTiles = kChunkTokens / 16 / kPasses;  // in a pass
  using Output = float[kTokenTiles][kTiles][2][4];

  // The lane's first element of the warp's rows.
  __device__ __forceinline__ state_t* lane_state(int slot) const {
    const int64_t row = static_cast<int64_t>(block_.head + head_) * p_.head_dim + block_.row +
                        first_row_ + lane_idx() / 4;
    return p_.states + slot * p_.slot_stride + row * kStateSize + lane_idx() % 4 * 2;
  }

  // Hides that the state is unchanged: the compiler would keep its rounded copy for the next pass.
  __device__ __forceinline__ void hide() {
    for_each([](int, float& first, float& second) {
      asm volatile("" : "+f"(first), "+f"(second));
    });
  }

  // out += C S^T.
  __device__ __forceinline__ void read_state(Output& out, const scalar_t* smem_c) const {
    const auto c = OperandTiles<kStatePitch>::down(smem_c);
#pragma unroll
    for (int k = 0; k < kStateSize / 16; ++k) {
      uint32_t state[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&sums)[4] = sums_[m][2 * k + i % 2];
          state[m][i] = pack2<scalar_t>(sums[i / 2 * 2], sums[i / 2 * 2 + 1]);
        }
#pragma unroll
      for (int i = 0; i < kTokenTiles; ++i) {
        uint32_t a[4];
        c.load(a, i * 16, k * 16);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) multiply(out[i][m][0], out[i][m][1], a, state[m]);
      }
    }
  }

  __device__ __forceinline__ static void scale_rows(Output& out, const float* factors) {
    factors += lane_idx() / 4;
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = factors[i * 16 + half * 8];
#pragma unroll
        for (auto& tiles : out[i])
#pragma unroll
          for (auto& tile : tiles) {
            tile[2 * half] *= factor;
            tile[2 * half + 1] *= factor;
          }
      }
  }

  // out += M X; M is lower triangular.
  __device__ __forceinline__ static void mix_tokens(Output& out, const scalar_t* smem_mix,
                                                    const scalar_t* smem_x, int first) {
    const auto mix = OperandTiles<kTokenPitch>::down(smem_mix);
    const auto x = OperandTiles<kRowPitch>::down(smem_x);
#pragma unroll
    for (int j = 0; j < first + kTokenTiles; ++j) {
      uint32_t b[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) x.load_trans(b[m], j * 16, m * 16);
#pragma unroll
      for (int i = max(j - first, 0); i < kTokenTiles; ++i) {
        uint32_t a[4];
        mix.load(a, i * 16, j * 16);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) multiply(out[i][m][0], out[i][m][1], a, b[m]);
      }
    }
  }

  // Stores out + d X.
  __device__ __forceinline__ void store_output(const Output& out, const scalar_t* x,
                                               const Chunk& tokens, int first) const {
    const int token = lane_idx() / 4, column = lane_idx() % 4 * 2;
    const int64_t stride = static_cast<int64_t>(p_.num_heads) * p_.head_dim;
    scalar_t* gmem = p_.out + (block_.sequence.begin + tokens.begin + first + token) * stride +
                     (block_.head + head_) * p_.head_dim + block_.row + first_row_ + column;
    x += token * kRowPitch + column;
#pragma unroll
    for (int i = 0; i < kTokenTiles * 16; i += 8) {
      if (first + i + token < tokens.count())
#pragma unroll
        for (int tile = 0; tile < 2 * kTiles; ++tile) {
          const float* const sums = out[i / 16][tile / 2][tile % 2] + i % 16 / 4;
          const auto input = load_vec<scalar_t, 2>(x + i * kRowPitch + tile * 8);
          *reinterpret_cast<uint32_t*>(gmem + tile * 8) = pack2<scalar_t>(
              sums[0] + skip_ * to_float(input.v[0]), sums[1] + skip_ * to_float(input.v[1]));
        }
      gmem += 8 * stride;
    }
  }

  // S = e^(c_last) S + X^T diag(write) B.
  __device__ __forceinline__ void update(const scalar_t* smem_b, const scalar_t* smem_x,
                                         const ChunkFactors& factors) {
    const auto b = OperandTiles<kStatePitch>::down(smem_b);
    const auto x = OperandTiles<kRowPitch>::across(smem_x);
    const float* const writes = factors.write + lane_idx() % 4 * 2;
    const float decay = factors.read[kChunkTokens - 1];
    for_each([&](int, float& first, float& second) {
      first *= decay;
      second *= decay;
    });
#pragma unroll
    for (int t = 0; t < kChunkTokens; t += 16) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        x.load_trans(a[m], t, m * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[m][i] = scale2(a[m][i], load_vec<float, 2>(writes + t + i / 2 * 8));
      }
#pragma unroll
      for (int n = 0; n < kStateSize / 16; ++n) {
        uint32_t columns[4];
        b.load_trans(columns, t, n * 16);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
          multiply(sums_[m][2 * n], sums_[m][2 * n + 1], a[m], columns);
      }
    }
  }

  // Calls f(offset from the lane's first element, element, its right neighbour).
  template <typename F>
  __device__ __forceinline__ void for_each(F f) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int tile = 0; tile < kStateSize / 8; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          f((m * 16 + half * 8) * kStateSize + tile * 8, sums_[m][tile][2 * half],
            sums_[m][tile][2 * half + 1]);
  }

  const ChunkBlock& block_;
  const Mamba2Params& p_;
  const int head_, first_row_;  // in the block
  const float skip_;
  float sums_[kTiles][kStateSize / 8][4];
};
