// Quantized pages in attention_decode_sm90: codes are converted exactly to halves in registers, and
// both products use half operands. The key scale is folded into the scores' factor, the value scale
// into the results' factor; P is rounded to half.
//
// Q K^T. Lane 4 g + t of mma holds k = 2t, 2t+1, 2t+8, 2t+9 of column g of B. The mapping of k to
// features is arbitrary as long as Q uses the same one. Here the four values are neighbours within
// the lane's 16-byte words t and (for D = 128) t + 4 of a key, so that one access loads a word that
// feeds four mma.
//   product s: features 64 (s / 4) + 16 t + 4 (s % 4) + {0, 1} and {2, 3}
// The mapping of column g to a key is arbitrary too: see code_row.
//
// P V. ldmatrix transposes two-byte elements, so a lane receives features 2g and 2g+1 of keys 2t
// and 2t+1. One byte permutation pairs the keys; the even features become the columns of one mma,
// the odd features those of another. A lane's accumulators are thus 4 neighbouring columns, 4t to
// 4t+3 of each 16.
#pragma once

#include "attention_decode/attention_decode_pipeline_sm90.cuh"
#include "common/mma.cuh"

// Operand type of P V.
#if PAGE_CODES
using prob_t = __half;
#else
using prob_t = scalar_t;
#endif

// Tile row of column `column` of the scores and P, within the same group of eight rows. Columns 2i
// and 2i+1, which are loaded together, map to rows i and i+4, so that their words are in different
// banks. With swizzled 64-byte rows the mapping is the identity.
__device__ __forceinline__ int code_row(int column) {
  if constexpr (!kHasCodes || (kSwizzled && kHeadDim == 64)) return column;
  return column / 8 * 8 + column % 8 / 2 + column % 2 * 4;
}

__device__ __forceinline__ Vec<uint32_t, 4> ld_shared_word(unsigned from) {
  Vec<uint32_t, 4> x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.v[0]), "=r"(x.v[1]), "=r"(x.v[2]), "=r"(x.v[3])
               : "r"(from)
               : "memory");
  return x;
}

// Loads operand A of Q K^T for 16 rows; `q` is the address of row 0. A bfloat16 row is multiplied
// by a power of two that brings its largest magnitude into [1, 2); `factor` receives the inverse.
template <int kSteps>
__device__ __forceinline__ void load_queries_for_codes(uint32_t (&frag)[kSteps][4],
                                                       float (&factor)[2], unsigned q) {
  static_assert(kSteps == kHeadDim / 16, "all of Q is in registers");
  const int lane_idx = threadIdx.x % kWarpSize;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned row =
        q + (lane_idx / 4 + half * 8) * kQueryPitch + lane_idx % 4 * 32;  // bytes: 16 features
    uint32_t words[kHeadDim / 8];                                         // pairs of features
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) {
      const Vec<uint32_t, 4> x = ld_shared_word(row + i / 2 * 128 + i % 2 * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i * 4 + j] = x.v[j];
    }
    factor[half] = 1.0f;
#if ENGINE_DTYPE == 2
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      largest = fmaxf(largest, fabsf(__uint_as_float(words[i] << 16)));
      largest = fmaxf(largest, fabsf(__uint_as_float(words[i] & 0xffff0000u)));
    }
    largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 2));
    const uint32_t exponent = __float_as_uint(largest) & 0x7f800000u;
    const bool is_usual = exponent != 0 && exponent < 0x7f000000u;
    factor[half] = is_usual ? __uint_as_float(exponent) : 1.0f;
    const float inverse = is_usual ? __uint_as_float(0x7f000000u - exponent) : 1.0f;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i)
      words[i] = pack2<__half>(__uint_as_float(words[i] << 16) * inverse,
                               __uint_as_float(words[i] & 0xffff0000u) * inverse);
#endif
#pragma unroll
    for (int s = 0; s < kHeadDim / 16; ++s) {
      frag[s][half] = words[2 * s];
      frag[s][2 + half] = words[2 * s + 1];
    }
  }
}

// Adds q.k of kRuns * 8 keys, from row `first` of the K tile on, to `sums`. With kTwoChains every
// second mma accumulates into `others` instead.
template <int kRuns, bool kTwoChains, int kSteps>
__device__ __forceinline__ void multiply_qk_codes(float (&sums)[kRuns][4],
                                                  float (&others)[kRuns][4],
                                                  const uint32_t (&q)[kSteps][4], unsigned tile,
                                                  int first) {
  const int lane_idx = threadIdx.x % kWarpSize;
  const int row = first + code_row(lane_idx / 4);
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    Vec<uint32_t, 4> words[kHeadDim / 64];
#pragma unroll
    for (int i = 0; i < kHeadDim / 64; ++i)
      words[i] = ld_shared_word(tile + tile_offset(row + run * 8, lane_idx % 4 + i * 4));
#pragma unroll
    for (int s = 0; s < kHeadDim / 16; ++s) {
      uint32_t b[2];
      codes_to_halves(words[s / 4].v[s % 4], b[0], b[1]);
      mma_m16n8k16<__half>(kTwoChains && s % 2 ? others[run] : sums[run], q[s], b);
    }
  }
}

// Adds P V to the sums of kSlice columns: of the i-th 16 columns, o[2 i] holds the even and o[2 i +
// 1] the odd ones. `p` is the ldmatrix address of this lane's row of P, `first_word` the word index
// of the first 16 columns.
template <int kSlice>
__device__ __forceinline__ void multiply_pv_codes(float (&o)[kSlice / 8][4], unsigned p,
                                                  unsigned tile, int first_word) {
  const int lane_idx = threadIdx.x % kWarpSize;
  const int row = lane_idx / 8 * 8 + code_row(lane_idx % 8);
#pragma unroll
  for (int j = 0; j < kTileKeys / 32; ++j) {
    uint32_t frag_p[2][4];
    ldmatrix_x4(frag_p[0], p + j * 64);
    ldmatrix_x4(frag_p[1], p + j * 64 + 32);
#pragma unroll
    for (int d = 0; d < kSlice / 16; ++d) {
      uint32_t v[4];  // v[m]: keys 8 m to 8 m + 7 of these 32
      ldmatrix_x4_trans(v, tile + tile_offset(row + j * 32, first_word + d));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t even[2], odd[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) codes_to_even_odd(v[2 * half + i], even[i], odd[i]);
        mma_m16n8k16<__half>(o[2 * d], frag_p[half], even);
        mma_m16n8k16<__half>(o[2 * d + 1], frag_p[half], odd);
      }
    }
  }
}
