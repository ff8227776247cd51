// Loads and multiplies stages of a one-byte weight (e4m3 or signed integers) in the kernels for few
// tokens. A stage is 128 columns of 16 rows, followed by the scales of these rows.
//
// A lane loads 16 consecutive bytes of a row for mma's A operand, so its columns differ from the
// instruction's layout; but they are the same for the weight and for x.
#pragma once

#include "common/codes.cuh"
#include "common/mma.cuh"
#include "common/number_pairs.cuh"
#include "moe_gemm/moe_few_x.cuh"

#if ENGINE_DTYPE != 0

constexpr int kStageColumns = 128, kRowBytes = kStageColumns;
constexpr int kStageCodes = kWeightRows * kRowBytes;
constexpr int kStageBytes =
    (kStageCodes + kWeightRows * 4 + 127) / 128 * 128;  // as in weight_stage.cuh
constexpr int kXPitch = kStageColumns * 2 + 16;  // bytes per row of x, padded: no bank conflicts
constexpr bool kIsE4m3 = IS_E4M3;
// Rows and columns per scale; 0: all columns.
constexpr int kBlockRows = BLOCK_ROWS, kBlockColumns = BLOCK_COLUMNS;
static_assert(kBlockColumns == 0 || kBlockColumns == kStageColumns, "a stage has a scale a row");

// Byte offset of 16-byte chunk `chunk` of a row. Odd rows are swizzled by 4 chunks: lanes that read
// two rows together then touch different banks.
__device__ __forceinline__ int chunk_at(int row, int chunk) {
  return row * kRowBytes + (chunk ^ row % 2 * 4) * 16;
}

struct MoeFewWeight {
  static constexpr int kRowStep = kWarpSize / (kRowBytes / 16);  // rows per copy of a warp
  static constexpr int kCopies = kWeightRows / kRowStep;
  const MoeFewParams& p;
  int place, scale_place;  // offsets in a stage: this lane's chunk of its first row, its scale
  bool has_scale;
  // Source of the next stage: this lane's chunk of its first row, the offsets of its other rows
  // from there, the bytes left in a row, and the scale that this lane copies.
  const unsigned char* from;
  unsigned step[kCopies];
  int bytes_left;
  const float* scale;

  __device__ __forceinline__ MoeFewWeight(const MoeFewParams& p, int lane_idx) : p(p) {
    place = chunk_at(lane_idx / 8, lane_idx % 8);
    scale_place = kStageCodes + lane_idx * 4, has_scale = lane_idx < kWeightRows;
  }

  __device__ __forceinline__ static int num_stages(const MoeFewParams& p) {
    return (p.k + kStageColumns - 1) / kStageColumns;
  }

  // Moves to stage `first` of 16 rows; rows past the last one repeat it.
  __device__ __forceinline__ void start(int expert, int first_row, int first, int lane_idx) {
    const int column = first * kRowBytes + lane_idx % 8 * 16;
    const int last = p.num_rows - 1, row = min(first_row + lane_idx / 8, last);
    from = p.data + (static_cast<int64_t>(expert) * p.num_rows + row) * p.k + column;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      step[i] = (min(first_row + lane_idx / 8 + i * kRowStep, last) - row) * p.k;
    bytes_left = p.k - column;
    const int row_blocks = (p.num_rows + kBlockRows - 1) / kBlockRows;
    const int own = min(first_row + lane_idx, last) / kBlockRows;
    const int64_t block = static_cast<int64_t>(expert) * row_blocks + own;
    scale = reinterpret_cast<const float*>(p.scales);
    scale += kBlockColumns > 0 ? block * num_stages(p) + first : block;
  }

  // Copies the next stage to `to`, with zeros beyond the end of k.
  __device__ __forceinline__ void load_stage(uint32_t to) {
    static_assert(kRowStep % 2 == 0, "a lane's chunks lie alike in all its rows");
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      cp_async_16(to + place + i * kRowStep * kRowBytes, from + step[i], bytes_left > 0);
    if (has_scale) cp_async_4(to + scale_place, scale);
    from += kRowBytes, bytes_left -= kRowBytes;
    if constexpr (kBlockColumns > 0) ++scale;
  }
};

// Moves the e4m3 codes in bytes 0 and 2 of a word (kOdd: 1 and 3), without their signs, to the
// exponent and mantissa fields of scalar_t.
constexpr int kRight = ENGINE_DTYPE == 1 ? 1 : 4;  // right shift of a code in the upper byte
constexpr uint32_t kNanCode = 0x7f00u >> kRight;
template <bool kOdd>
__device__ __forceinline__ uint32_t e4m3_sizes(uint32_t word) {
  return (kOdd ? word >> kRight : word << (8 - kRight)) & (kNanCode * 0x00010001u);
}
// Converts these codes to numbers, except NaN. scalar_t's exponent field 0 stands for 2^(1 - bias),
// so multiplying by 2^(bias - 7) is correct for subnormal codes too.
template <bool kOdd>
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t word, uint32_t sizes) {
  const uint32_t sign = (kOdd ? word : word << 8) & 0x80008000u;
  return multiply_pair(sizes | sign, kIsHalf ? 0x5c005c00u : 0x7b807b80u);
}

template <int kTokens>
struct MoeFewProduct {
  using Shape = FewRowsShape<kTokens>;
  // e4m3 codes are converted to float16 by an instruction, so x must be float16, too.
  static constexpr bool kAsHalves = kIsE4m3 && kArch >= 890 && (kIsHalf || kTokens == 1);
  static constexpr bool kScalesX = kAsHalves && !kIsHalf, kPairsX = false;
  static constexpr int kPeak = 14;  // below float16's largest exponent, 15
  static constexpr int kColumns = kTokens == 1 ? 1 : 2;
  static constexpr int kSets = kAsHalves ? 2 : 1;  // independent accumulators of half a stage
  float total[2][kColumns];                        // rows g and g + 8, tokens 2t and 2t + 1
  uint32_t most[2];                                // largest code of each row, in each half-word

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) total[i][j] = 0.0f;
    }
  }

  // Decodes four codes each from rows g and g + 8. With kAsHalves columns 0 and 1 are a pair, and 2
  // and 3; else 0 and 2, and 1 and 3.
  __device__ __forceinline__ void decode(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    if constexpr (kAsHalves) {
      halves_of_e4m3(low, a[0], a[2]), halves_of_e4m3(high, a[1], a[3]);
    } else if constexpr (kIsE4m3) {
      const uint32_t words[2] = {low, high};
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t even = e4m3_sizes<false>(words[row]), odd = e4m3_sizes<true>(words[row]);
        most[row] = __vimax3_s16x2(most[row], even, odd);
        a[row] = e4m3_pair<false>(words[row], even), a[row + 2] = e4m3_pair<true>(words[row], odd);
      }
    } else {
      a[0] = signed_bytes(low), a[1] = signed_bytes(high);
      a[2] = signed_bytes(low >> 8), a[3] = signed_bytes(high >> 8);
    }
  }

  // Adds the products of 16 bytes each of rows g and g + 8 with the same columns of token g.
  __device__ __forceinline__ void add(const unsigned char* low_at, const unsigned char* x_at,
                                      float (&acc)[kSets][4]) {
    const uint4 low = *reinterpret_cast<const uint4*>(low_at);
    const uint4 high = *reinterpret_cast<const uint4*>(low_at + 8 * kRowBytes);
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w};
    const uint32_t highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 x = *reinterpret_cast<const uint4*>(x_at + half * 16);
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        decode(lows[2 * half + i], highs[2 * half + i], a);
        if constexpr (kAsHalves) {
          const uint32_t b[2] = {xs[2 * i], xs[2 * i + 1]};
          mma_m16n8k16<__half>(acc[i], a, b);
        } else {
          const uint32_t b[2] = {__byte_perm(xs[2 * i], xs[2 * i + 1], 0x5410),
                                 __byte_perm(xs[2 * i], xs[2 * i + 1], 0x7632)};
          mma_m16n8k16<scalar_t>(acc[0], a, b);
        }
      }
    }
  }

  // Adds the products of a stage.
  __device__ __forceinline__ void multiply(const unsigned char* stage, const MoeStageX& x,
                                           int lane_idx) {
    const int g = lane_idx / 4, t = lane_idx % 4;
    constexpr int kLaneBytes = 32;  // bytes of x per 16 bytes of the weight
    const unsigned char* x_at = x.rows + min(g, x.count - 1) * x.pitch + t * kLaneBytes;
    float acc[2][kSets][4] = {};
    add(stage + chunk_at(g, t), x_at, acc[0]);
    add(stage + chunk_at(g, t + 4), x_at + 4 * kLaneBytes, acc[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = *reinterpret_cast<const float*>(stage + kStageCodes + (g + 8 * i) * 4);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        float sum = acc[0][0][2 * i + j] + acc[1][0][2 * i + j];
        if constexpr (kSets == 2) sum += acc[0][1][2 * i + j] + acc[1][1][2 * i + j];
        if constexpr (kScalesX) sum *= x.factor;
        total[i][j] = fmaf(scale, sum, total[i][j]);
      }
    }
  }

  // Stores the sums, [token][row], for the warps that share the rows.
  __device__ __forceinline__ void store(float* sums, int lane_idx) {
    const int g = lane_idx / 4, t = lane_idx % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool is_nan = false;
      if constexpr (kIsE4m3 && !kAsHalves) {
        is_nan = most[i] >> 16 == kNanCode || (most[i] & 0xffff) == kNanCode;
        is_nan = (__ballot_sync(kFullMask, is_nan) >> (4 * g) & 15) != 0;  // any of the row's lanes
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (2 * t + j >= kTokens) continue;
        sums[(2 * t + j) * Shape::kPitch + g + 8 * i] = is_nan ? quiet_nan() : total[i][j];
      }
    }
  }
};

#endif
