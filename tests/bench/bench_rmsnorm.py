"""rmsnorm with residual, bfloat16: GB/s of two reads and two writes."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.tolerances import assert_close
from tests.bench.case import BenchCase


def _case(rows: int, n: int) -> BenchCase:
    def make(xp, seed):
        x, residual = (cases.normal((rows, n), "bfloat16", seed + i) for i in (0, 1))
        return cases.to_module(xp, x, residual, cases.normal((n,), "bfloat16", seed + 2, mean=1.0))

    def run(x, residual, weight):
        return kernels.rmsnorm(x, weight, residual=residual)

    def check(args, result):
        x, residual, weight = map(to_numpy, args)
        assert_close(result[0], reference.rmsnorm(x, weight, residual=residual)[0], reduction=n)

    return BenchCase(f"({rows}, {n})", make, run, nbytes=4 * rows * n * 2, check=check)


CASES = [_case(1, 1024), _case(256, 4096), _case(16384, 4096), _case(4096, 16384)]
