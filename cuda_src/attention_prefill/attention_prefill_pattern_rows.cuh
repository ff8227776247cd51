// Row rule of attention_prefill.cu, with or without a pattern.
#pragma once

#include "common/attention.cuh"
#include "common/attention_pattern.cuh"

// A row sees a key only if both RowRule and a pattern allow it.
struct PatternRowRule : RowRule {
  static constexpr bool kHasPattern = true;
  Pattern pattern;
  int first_position;  // position of token 0: key index if causal, otherwise query index

  __device__ __forceinline__ PatternRowRule(const RowRule& rows, const Pattern& pattern,
                                            int first_position)
      : RowRule(rows), pattern(pattern), first_position(first_position) {}

  __device__ __forceinline__ bool in_pattern(int row, int key) const {
    return pattern.sees(first_position + row / group, key);
  }
  __device__ __forceinline__ bool skips(int first, int last, int key, int keys) const {
    return pattern.sees_tile(first_position + first / group, first_position + last / group, key,
                             key + keys) == 0;
  }
};

template <bool kPattern, typename Params>
__device__ __forceinline__ auto make_rows(const Params& p, int num_tokens, int num_keys) {
  const RowRule rows(num_tokens, p.group, num_keys, p.causal != 0, p.window);
  if constexpr (kPattern)
    return PatternRowRule(rows, make_pattern(p), p.causal ? num_keys - num_tokens : 0);
  else
    return rows;
}
