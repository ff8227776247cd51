"""adapted_gemm, bfloat16: a product with LoRA adapters, vs the product alone, as the baseline."""

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

_RANK = 16


def _case(
    num_tokens: int,
    num_adapters: int,
    bounds: tuple[int, ...],
    depth: int,
    activation: str | None = None,
) -> BenchCase:
    # Prompts follow each other in a batch; a step of decoding mixes the adapters.
    rows = np.arange(num_tokens)
    few = num_tokens <= 256
    adapters = rows % num_adapters if few else rows * num_adapters // num_tokens
    order, offsets = sorted_by_adapter(adapters, num_adapters)
    columns = bounds[-1]
    low = _RANK * len(bounds)
    num_splits = choose_num_splits(num_tokens, num_adapters, low, depth)

    def make(xp, seed):
        x = normal_on(xp, (num_tokens, depth), "bfloat16", seed)
        weight = normal_on(xp, (columns, depth), "bfloat16", seed + 1)
        h = normal_on(xp, (num_splits, num_tokens, low), "float32", seed + 2)
        b = normal_on(xp, (num_adapters, columns, _RANK), "bfloat16", seed + 3)
        slots = adapters.astype(np.int32)
        return x, weight, h, b, *cases.to_module(xp, order, offsets, slots)

    def run(x, weight, h, b, order, offsets, slots):
        low_rank = kernels.LowRank(h, b, order, offsets, slots, bounds)
        return kernels.gemm(x, weight, activation=activation, pdl=True, low_rank=low_rank)

    def alone(x, weight, *_):
        return kernels.gemm(x, weight, activation=activation, pdl=True)

    def check(args, result):
        count = min(num_tokens, 16)
        given = (args[0][:count], args[1], args[2][:, :count], args[3])
        x, weight, h, b = map(to_numpy, given)
        lists = sorted_by_adapter(adapters[:count], num_adapters)
        low_rank = kernels.LowRank(h, b, *lists, adapters[:count].astype(np.int32), bounds)
        want = reference.gemm(x, weight, activation=activation, low_rank=low_rank)
        assert_close(result[:count], want, reduction=depth)

    used = min(num_tokens, num_adapters)
    out = columns // 2 if activation else columns
    nbytes = 2 * (num_tokens * (depth + out) + columns * depth + used * columns * _RANK)
    nbytes += 4 * num_splits * num_tokens * low
    flops = 2 * num_tokens * columns * (depth + _RANK)
    name = f"T {num_tokens}, S {num_adapters}, {depth} -> {columns} in {len(bounds)} parts"
    return BenchCase(
        name, make, run, nbytes=nbytes, flops=flops, check=check, baselines={"alone": alone}
    )


_QKV = (4096, 5120, 6144)
_GATE_UP = (14336, 28672)
CASES = [
    *(_case(n, 16, _QKV, 4096) for n in (16, 64, 256, 8192)),
    *(_case(n, 16, (4096,), 14336) for n in (64, 8192)),
    *(_case(n, 16, _GATE_UP, 4096, "swiglu") for n in (64, 8192)),
    _case(64, 1, _QKV, 4096),
    _case(8192, 1, _QKV, 4096),
]
CPU_CASES = [_case(4, 2, (64, 128), 64), _case(40, 2, (64, 128), 64, "swiglu")]
