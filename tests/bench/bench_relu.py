"""relu and its square, float16: GB/s of one read and one write, vs the array operations."""

from __future__ import annotations

from functools import partial

from engine import kernels, reference
from engine.device import array_module, to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close


def _formula(x, squared):
    y = array_module(x).maximum(x, 0)
    return y * y if squared else y


def _gated_case(rows: int, f: int) -> BenchCase:
    def make(xp, seed):
        return (xp.asarray(cases.normal((rows, 2 * f), "float16", seed)),)

    def check(args, result):
        assert_close(result, reference.relu(to_numpy(args[0]), squared=True, gated=True))

    run = partial(kernels.relu, squared=True, gated=True)
    return BenchCase(
        f"({rows}, 2 x {f}) squared gated", make, run, nbytes=3 * rows * f * 2, check=check
    )


def _case(rows: int, f: int, squared: bool = False) -> BenchCase:
    def make(xp, seed):
        return (xp.asarray(cases.normal((rows, f), "float16", seed)),)

    def check(args, result):
        assert_close(result, reference.relu(to_numpy(args[0]), squared=squared))

    return BenchCase(
        f"({rows}, {f}){' squared' * squared}",
        make,
        partial(kernels.relu, squared=squared),
        nbytes=2 * rows * f * 2,
        baselines={"formula": partial(_formula, squared=squared)},
        check=check,
    )


CASES = [
    *(_case(1, 4864), _case(256, 8192), _case(2048, 14336)),
    *(_case(1, 18432, True), _case(256, 18432, True), _case(2048, 18432, True)),
    *(_gated_case(1, 6912), _gated_case(2048, 6912)),
]
