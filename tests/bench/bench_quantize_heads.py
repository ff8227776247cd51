"""quantize_heads, bfloat16: GB/s of one read of the values and one write of the codes."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on


def _case(tokens: int, heads: int, head_dim: int, rotate: bool) -> BenchCase:
    shape = (tokens, heads, head_dim)

    def make(xp, seed):
        return (normal_on(xp, shape, "bfloat16", seed),)

    def run(x):
        return kernels.quantize_heads(x, rotate=rotate)

    def check(args, result):
        want, _ = reference.quantize_heads(to_numpy(args[0]), rotate=rotate)
        steps = np.abs(to_numpy(result[0]).astype(int) - want.astype(int))
        assert steps.max() <= 1 and (steps != 0).mean() <= 0.005

    name = f"{shape}{' rotated' if rotate else ''}"
    return BenchCase(name, make, run, nbytes=3 * tokens * heads * head_dim, check=check)


CASES = [
    _case(8192, 8, 64, False),
    _case(32768, 8, 64, False),
    _case(32768, 8, 64, True),
    _case(32768, 8, 128, False),
]
