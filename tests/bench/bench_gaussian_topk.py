"""gaussian_topk, bfloat16: GB/s of one read and one write, at Gemma 3n's width."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close

_FACTOR = 1.6448536  # keeps 5 %


def _case(rows: int, n: int) -> BenchCase:
    def make(xp, seed):
        return (xp.asarray(cases.normal((rows, n), "bfloat16", seed)), _FACTOR)

    def check(args, result):
        want = reference.gaussian_topk(to_numpy(args[0]), _FACTOR)
        assert_close(result, want, reduction=n)

    return BenchCase(
        f"({rows}, {n})", make, kernels.gaussian_topk, nbytes=2 * rows * n * 2, check=check
    )


CASES = [_case(1, 16384), _case(256, 16384), _case(4096, 16384)]
