"""match_rms, bfloat16: GB/s of two reads and one write."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close


def _case(rows: int, n: int) -> BenchCase:
    def make(xp, seed):
        return cases.to_module(xp, *(cases.normal((rows, n), "bfloat16", seed + i) for i in (0, 1)))

    def check(args, result):
        assert_close(result, reference.match_rms(*map(to_numpy, args)), reduction=n)

    return BenchCase(
        f"({rows}, {n})", make, kernels.match_rms, nbytes=3 * rows * n * 2, check=check
    )


CASES = [_case(1, 2048), _case(256, 2048), _case(4096, 2048)]
