// Multiplies a stage of four-bit floats for one token, as float16: e2m1 codes are moved to the
// fields of e4m3, which an instruction converts. x is float16 too, with columns c and c + 8 of 16
// side by side (kPairsX): a code's neighbour in its byte of the packed word.
#pragma once

#include "common/codes.cuh"
#include "common/mma.cuh"
#include "common/weight_stage.cuh"
#include "moe_gemm/moe_few_x.cuh"

#if ENGINE_DTYPE != 0

struct MoeE2m1Product {
  using Shape = FewRowsShape<1>;
  static constexpr bool kScalesX = true, kPairsX = true;
  static constexpr int kPeak = 6;  // sums of a stage, times scales up to 2^114, are finite
  // 2^6, as e4m3's exponents are biased by 7 and e2m1's by 1, and 2/3 for e8m0_by_3_halves.
  static constexpr float kUnit = 64.0f * 2 / 3;
  float total[2];  // rows g and g + 8, divided by kUnit

  __device__ __forceinline__ void clear() { total[0] = total[1] = 0.0f; }

  // Returns 1.5 times 2^(e - 127), which one instruction computes; 255 becomes NaN. 0 loses the
  // factor 1.5: it becomes 2^-127.
  __device__ __forceinline__ static float e8m0_by_3_halves(const unsigned char* e) {
    uint32_t bits;
    asm("mad.lo.u32 %0, %1, 0x800000, 0x400000;" : "=r"(bits) : "r"(static_cast<uint32_t>(*e)));
    return __uint_as_float(bits);
  }

  // Adds the products of a step of 16 columns. Nibbles of rows g and g + 8 alternate.
  __device__ __forceinline__ static void step(uint32_t word, uint2 x, float (&acc)[4]) {
    constexpr uint32_t kSign = 0x80808080u, kSize = 0x1c1c1c1cu;
    uint32_t a[4];
    halves_of_e4m3((word << 4 & kSign) | (word << 2 & kSize), a[0], a[2]);
    halves_of_e4m3((word & kSign) | (word >> 2 & kSize), a[1], a[3]);
    mma_m16n8k16<__half>(acc, a, {x.x, x.y});
  }

  __device__ __forceinline__ void multiply(const unsigned char* stage, const MoeStageX& x,
                                           int lane_idx) {
    static_assert(kGroup == 32 && kTileColumns == 64 && kScaleType == kE8m0Scale);
    const int g = lane_idx / 4, t = lane_idx % 4;
    const unsigned char* scales = stage + kScalesAt + g * kScaleBytes;
    float sum[2] = {};
    constexpr int kUnroll = kArch >= 1000 ? 2 : kStageTiles;  // more would spill registers there
#pragma unroll kUnroll
    for (int tile = 0; tile < kStageTiles; ++tile) {
      const auto load = [](const unsigned char* at) { return *reinterpret_cast<const uint4*>(at); };
      const uint4 words = load(stage + tile * kDataBytes + lane_idx * 16);
      const unsigned char* x_at = x.rows + tile * kTileColumns * 2 + t * 32;
      const uint4 x_low = load(x_at), x_high = load(x_at + 16);
      float acc[2][4] = {};
      step(words.x, {x_low.x, x_low.y}, acc[0]);
      step(words.y, {x_low.z, x_low.w}, acc[0]);
      step(words.z, {x_high.x, x_high.y}, acc[1]);
      step(words.w, {x_high.z, x_high.w}, acc[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned char* own = scales + (2 * tile + i) * kScaleTileBytes;
        sum[0] = fmaf(e8m0_by_3_halves(own), acc[i][0], sum[0]);
        sum[1] = fmaf(e8m0_by_3_halves(own + 1), acc[i][2], sum[1]);
      }
    }
    total[0] = fmaf(x.factor, sum[0], total[0]), total[1] = fmaf(x.factor, sum[1], total[1]);
  }

  __device__ __forceinline__ void store(float* sums, int lane_idx) const {
    if (lane_idx % 4 != 0) return;
    sums[lane_idx / 4] = total[0] * kUnit, sums[lane_idx / 4 + 8] = total[1] * kUnit;
  }
};

#endif
