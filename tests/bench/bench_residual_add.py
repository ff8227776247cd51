"""residual_add, float16: GB/s of two reads and one write, vs x + residual."""

from __future__ import annotations

import operator

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close


def _case(rows: int, n: int) -> BenchCase:
    def make(xp, seed):
        return cases.to_module(xp, *(cases.normal((rows, n), "float16", seed + i) for i in (0, 1)))

    def check(args, result):
        assert_close(result, reference.residual_add(*map(to_numpy, args)))

    return BenchCase(
        f"({rows}, {n})",
        make,
        kernels.residual_add,
        nbytes=3 * rows * n * 2,
        flops=rows * n,
        baselines={"x + y": operator.add},
        check=check,
    )


CASES = [_case(1, 4096), _case(256, 4096), _case(16384, 4096)]
