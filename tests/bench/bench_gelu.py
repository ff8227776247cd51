"""gelu by tanh, float16: GB/s of one read and one write, vs the formula in array operations."""

from __future__ import annotations

from functools import partial

from engine import kernels, reference
from engine.device import array_module, to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close


def _formula(x):
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * (1 + array_module(x).tanh(u)) / 2


def _case(rows: int, f: int) -> BenchCase:
    def make(xp, seed):
        return (xp.asarray(cases.normal((rows, f), "float16", seed)),)

    def check(args, result):
        assert_close(result, reference.gelu(to_numpy(args[0]), approximate="tanh"))

    return BenchCase(
        f"({rows}, {f})",
        make,
        partial(kernels.gelu, approximate="tanh"),
        nbytes=2 * rows * f * 2,
        baselines={"formula": _formula},
        check=check,
    )


CASES = [_case(1, 4864), _case(256, 8192), _case(2048, 14336)]
