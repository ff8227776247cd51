"""rmsnorm_quantize with residual, bfloat16 to e4m3: GB/s of two reads, the sum and the codes."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on


def _case(rows: int, n: int) -> BenchCase:
    def make(xp, seed):
        x, residual = (normal_on(xp, (rows, n), "bfloat16", seed + i) for i in (0, 1))
        return x, residual, xp.asarray(cases.normal((n,), "bfloat16", seed + 2, mean=1.0))

    def run(x, residual, weight):
        return kernels.rmsnorm_quantize(x, weight, residual=residual)

    def check(args, result):
        x, residual, weight = (to_numpy(a) for a in (args[0][:64], args[1][:64], args[2]))
        want = reference.rmsnorm_quantize(x, weight, residual=residual)[0]
        steps = np.abs(to_numpy(result[0][:64]).astype(int) - want.astype(int))
        assert steps.max() <= 1 and (steps != 0).mean() <= 0.01

    return BenchCase(f"({rows}, {n})", make, run, nbytes=7 * rows * n, check=check)


CASES = [_case(rows, n) for rows in (1, 64, 4096) for n in (1024, 4096, 8192)]
