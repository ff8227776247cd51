"""scale_rows, bfloat16: GB/s of one read and one write; a factor of 1 in place moves nothing."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close


def _case(rows: int, n: int, factor: float, *, in_place: bool = False) -> BenchCase:
    def make(xp, seed):
        return normal_on(xp, (rows, n), "bfloat16", seed), xp.full(1, factor, np.float32)

    def run(x, factors):
        return kernels.scale_rows(x, factors, out=x if in_place else None)

    def check(args, result):
        x, factors = to_numpy(args[0][:512]), to_numpy(args[1])
        assert_close(result[:512], reference.scale_rows(x, factors))

    name = f"({rows}, {n}) x {factor}{', in place' if in_place else ''}"
    return BenchCase(name, make, run, 0 if in_place else 4 * rows * n, check=check)


CASES = [_case(16384, 4096, 0.5), _case(128256, 4096, 0.5), _case(128256, 4096, 1.0, in_place=True)]
