"""relu, float16: GB/s of one read and one write, vs the formula in array operations."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import array_module, to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close


def _formula(x):
    return array_module(x).maximum(x, 0)


def _case(rows: int, f: int) -> BenchCase:
    def make(xp, seed):
        return (xp.asarray(cases.normal((rows, f), "float16", seed)),)

    def check(args, result):
        assert_close(result, reference.relu(to_numpy(args[0])))

    return BenchCase(
        f"({rows}, {f})",
        make,
        kernels.relu,
        nbytes=2 * rows * f * 2,
        baselines={"formula": _formula},
        check=check,
    )


CASES = [_case(1, 4864), _case(256, 8192), _case(2048, 14336)]
