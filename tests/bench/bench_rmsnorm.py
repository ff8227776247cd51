"""rmsnorm with residual, bfloat16: GB/s of two reads and two writes."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.cases_attention import normal_on
from engine.testing.tolerances import assert_close


def _case(rows: int, n: int, *, is_cached: bool = False) -> BenchCase:
    def make(xp, seed):
        x, residual = (normal_on(xp, (rows, n), "bfloat16", seed + i) for i in (0, 1))
        return x, residual, xp.asarray(cases.normal((n,), "bfloat16", seed + 2, mean=1.0))

    def run(x, residual, weight):
        return kernels.rmsnorm(x, weight, residual=residual)

    def check(args, result):
        x, residual, weight = to_numpy(args[0][:512]), to_numpy(args[1][:512]), to_numpy(args[2])
        want = reference.rmsnorm(x, weight, residual=residual)[0]
        assert_close(result[0][:512], want, reduction=n)

    name, copies = (", from L2", 2) if is_cached else ("", 0)
    nbytes = 4 * rows * n * 2
    return BenchCase(f"({rows}, {n}){name}", make, run, nbytes, copies=copies, check=check)


CASES = [
    _case(1, 1024),
    _case(64, 4096),
    _case(64, 4096, is_cached=True),
    _case(256, 4096),
    _case(256, 4096, is_cached=True),
    _case(16384, 1024),
    _case(16384, 4096),
    _case(8192, 8192),
    _case(4096, 16384),
]
