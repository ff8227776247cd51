"""lora_expand, bfloat16, accumulating: GB/s of results and of the matrices that tokens use."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.kernels.lora_shrink import choose_num_splits
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.cases_lora import sorted_by_adapter
from engine.testing.tolerances import assert_close


def _case(num_tokens: int, num_adapters: int, rank: int, bounds: tuple[int, ...]) -> BenchCase:
    adapters = np.arange(num_tokens) % num_adapters
    order, offsets = sorted_by_adapter(adapters, num_adapters)
    columns = bounds[-1]
    low = rank * len(bounds)
    num_splits = choose_num_splits(num_tokens, num_adapters, low, 4096)

    def make(xp, seed):
        h = normal_on(xp, (num_splits, num_tokens, low), "float32", seed)
        b = normal_on(xp, (num_adapters, columns, rank), "bfloat16", seed + 1)
        out = xp.zeros((num_tokens, columns), b.dtype)
        return h, b, *cases.to_module(xp, order, offsets), out

    def run(h, b, order, offsets, out):
        options = {"bounds": bounds, "accumulate": True, "pdl": True}
        return kernels.lora_expand(h, b, order, offsets, **options, out=out)

    def check(args, result):  # `result` is the first that was added to zeros
        few = min(num_tokens, 32)
        lists = sorted_by_adapter(adapters[:few], num_adapters)
        h, b = to_numpy(args[0][:, :few]), to_numpy(args[1])
        want = reference.lora_expand(h, b, *lists, bounds=bounds)
        assert_close(result[:few], want, reduction=rank)

    used = min(num_tokens, num_adapters)
    nbytes = 2 * columns * (2 * num_tokens + used * rank) + 4 * num_splits * num_tokens * low
    flops = 2 * num_tokens * columns * rank
    name = f"T {num_tokens}, S {num_adapters}, rank {rank} -> {columns} in {len(bounds)} parts"
    return BenchCase(name, make, run, nbytes=nbytes, flops=flops, check=check)


_QKV = (4096, 5120, 6144)
CASES = [
    *(_case(n, 16, 16, _QKV) for n in (1, 16, 64, 256)),
    _case(64, 16, 16, (14336, 28672)),
    _case(64, 64, 16, _QKV),
    _case(64, 16, 64, _QKV),
    _case(8192, 16, 16, _QKV),
    _case(8192, 16, 64, _QKV),
]
CPU_CASES = [_case(4, 2, 8, (64, 128))]
