"""swiglu_quantize, bfloat16 to e4m3: GB/s of one read of gate and up and one write of the codes."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on


def _case(rows: int, n: int) -> BenchCase:
    def make(xp, seed):
        return (normal_on(xp, (rows, 2 * n), "bfloat16", seed),)

    def check(args, result):
        want, _ = reference.swiglu_quantize(to_numpy(args[0][:64]))
        steps = np.abs(to_numpy(result[0][:64]).astype(int) - want.astype(int))
        assert steps.max() <= 1 and (steps != 0).mean() <= 0.005

    nbytes = 5 * rows * n
    return BenchCase(f"({rows}, {n})", make, kernels.swiglu_quantize, nbytes=nbytes, check=check)


CASES = [_case(rows, n) for rows in (1, 64, 4096) for n in (4096, 14336)]
