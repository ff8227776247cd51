"""lora_shrink, bfloat16: GB/s of activations and of the matrices that tokens use, rank 16."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.cases_lora import sorted_by_adapter
from engine.testing.tolerances import assert_close


def _case(num_tokens: int, num_adapters: int, columns: int, depth: int) -> BenchCase:
    adapters = np.arange(num_tokens) % num_adapters
    order, offsets = sorted_by_adapter(adapters, num_adapters)

    def make(xp, seed):
        x = normal_on(xp, (num_tokens, depth), "bfloat16", seed)
        a = normal_on(xp, (num_adapters, columns, depth), "bfloat16", seed + 1)
        return x, a, *cases.to_module(xp, order, offsets)

    def run(*args):
        return kernels.lora_shrink(*args, pdl=True)

    def check(args, result):
        few = np.arange(min(num_tokens, 32))
        lists = sorted_by_adapter(adapters[few], num_adapters)
        want = reference.lora_shrink(to_numpy(args[0][: len(few)]), to_numpy(args[1]), *lists)
        got = to_numpy(result[:, : len(few)]).sum(0, keepdims=True)
        assert_close(got, want, reduction=depth)

    used = min(num_tokens, num_adapters)
    nbytes = 2 * depth * (num_tokens + used * columns) + 4 * num_tokens * columns
    flops = 2 * num_tokens * columns * depth
    name = f"T {num_tokens}, S {num_adapters}, {depth} -> {columns}"
    return BenchCase(name, make, run, nbytes=nbytes, flops=flops, check=check)


CASES = [
    *(_case(n, 16, 48, 4096) for n in (1, 16, 64, 256)),
    _case(64, 16, 16, 14336),
    _case(64, 64, 48, 4096),
    _case(8192, 16, 48, 4096),
    _case(8192, 16, 192, 4096),
]
CPU_CASES = [_case(4, 2, 16, 256)]
