"""clamp, float16, in place: GB/s of one read and one write, vs `clip`."""

from __future__ import annotations

from engine import kernels, reference
from engine.device import array_module, to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close


def _formula(x):
    return array_module(x).clip(x, -8, 8)


def _run(x):
    return kernels.clamp(x, -8.0, 8.0, out=x)


def _case(rows: int, f: int) -> BenchCase:
    def make(xp, seed):
        return (xp.asarray(cases.normal((rows, f), "float16", seed, scale=4.0)),)

    def check(args, result):  # in place: the result is the argument
        assert_close(result, reference.clamp(to_numpy(args[0]), -8.0, 8.0))

    return BenchCase(
        f"({rows}, {f})",
        make,
        _run,
        nbytes=2 * rows * f * 2,
        baselines={"clip": _formula},
        check=check,
    )


# Rows of q, k and v of OLMo 7B.
CASES = [_case(1, 12288), _case(256, 12288), _case(8192, 12288)]
