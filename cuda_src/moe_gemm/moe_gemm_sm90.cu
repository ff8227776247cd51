// Grouped GEMM on Hopper, tokens times their experts' matrices: TMA, mbarriers, wgmma.
//
//   out[i] = activation(weight[e] x[order[i] / top_k] + bias[e])
//   out[order[i]] = activation(weight[e] x[i] + bias[e]) pair_weights[order[i]]
//
// for i in [offsets[e], offsets[e + 1]) of every expert e: the second formula if `scatters`. With
// TRANSPOSED the weight is (E, K, R), and its transposed matrices are multiplied. Each module is
// compiled for one kind of weight: scalar_t (WEIGHT_KIND 0), a packed format (1), one-byte codes
// (2), or one-byte codes with x quantized as well (3; with QUANTIZES_OUT the result, too).
// Arguments: MoeGemmSm90Params in moe_dense_entry_sm90.cuh, MoeGemmQuantizedSm90Params in
// moe_quantized_entry_sm90.cuh.
//
// Numerics: products on tensor cores, all else in float, one rounding at the end. k is summed in
// ascending steps of 16, regardless of the tile and the rest of the batch. Quantized weights are
// rounded to scalar_t before the product, like `dequantize`; products of codes are summed over 128
// values of k, and these sums times their scales are added in float.
// Parallelisation: persistent CTAs iterate over tiles of 64 to 256 weight rows by up to kTokens of
// the expert's tokens; every CTA derives its tiles from `offsets` alone. A producer warpgroup loads
// the weight by TMA, and gathers rows of x through `order` by cp.async; sorted rows are loaded by
// TMA. The weight is wgmma's A operand: with few tokens per expert the product takes only as long
// as reading the weights once. Codes and scales are decoded to fragments in a consumer's registers
// while wgmma multiplies those of the preceding steps.
// Mirror: engine/reference/moe_gemm.py
#if WEIGHT_KIND == 0
#include "moe_gemm/moe_dense_entry_sm90.cuh"
#else
#include "moe_gemm/moe_quantized_entry_sm90.cuh"
#endif
