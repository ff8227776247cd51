"""head_gemm, bfloat16: GB/s of the weights and activations, at the shapes of DeepSeek-V3."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close


def _case(num_tokens: int, num_heads: int, columns: int, depth: int) -> BenchCase:
    def make(xp, seed):
        x = normal_on(xp, (num_tokens, num_heads, depth), "bfloat16", seed)
        return x, normal_on(xp, (num_heads, columns, depth), "bfloat16", seed + 1)

    def check(args, result):
        few = min(num_tokens, 64)
        x, weight = to_numpy(args[0][:few, :4]), to_numpy(args[1][:4])
        want = reference.head_gemm(x, weight)
        assert_close(result[:few, :4].copy(), want, reduction=depth)

    nbytes = 2 * num_heads * (columns * depth + num_tokens * (columns + depth))
    flops = 2 * num_tokens * num_heads * columns * depth
    name = f"T {num_tokens}, H {num_heads}, {depth} -> {columns}"
    return BenchCase(name, make, kernels.head_gemm, nbytes=nbytes, flops=flops, check=check)


CASES = [
    *(_case(n, 128, 512, 128) for n in (1, 16, 64, 256)),
    *(_case(n, 128, 128, 512) for n in (1, 16, 64, 256)),
    _case(64, 16, 512, 128),
]
CPU_CASES = [_case(4, 4, 64, 64)]
