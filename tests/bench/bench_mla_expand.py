"""mla_expand, bfloat16, keys of 128 + 64: GB/s read and written."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on


def _case(num_tokens: int, num_heads: int) -> BenchCase:
    def make(xp, seed):
        up = normal_on(xp, (num_tokens, num_heads, 256), "bfloat16", seed)
        return up, normal_on(xp, (num_tokens, 64), "bfloat16", seed + 1)

    def run(up, k_rope):
        return kernels.mla_expand(up, k_rope, nope_dim=128)

    def check(args, result):
        up, k_rope = (to_numpy(x[:64]) for x in args)
        want = reference.mla_expand(up, k_rope, nope_dim=128)
        np.testing.assert_array_equal(to_numpy(result[:64]), want)

    nbytes = 2 * num_tokens * num_heads * (128 + 192)
    return BenchCase(f"T {num_tokens}, H {num_heads}", make, run, nbytes=nbytes, check=check)


CASES = [_case(64, 16), _case(8192, 16), _case(4096, 128)]
CPU_CASES = [_case(16, 4)]
