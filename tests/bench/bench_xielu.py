"""xielu, bfloat16: GB/s of one read and one write, vs the formula in array operations."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import array_module, to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close

_COEFFICIENTS = np.array([0.8, 0.9, 0.5, -1e-6], np.float32)


def _formula(x, coefficients):
    xp = array_module(x)
    positive, negative, slope, eps = (coefficients[i] for i in range(4))
    real = x.astype("float32")
    curve = negative * (xp.expm1(xp.minimum(real, eps)) - real)
    return (xp.where(real > 0, positive * real * real, curve) + slope * real).astype(x.dtype)


def _case(rows: int, f: int) -> BenchCase:
    def make(xp, seed):
        return cases.to_module(xp, cases.normal((rows, f), "bfloat16", seed), _COEFFICIENTS)

    def check(args, result):
        assert_close(result, reference.xielu(*map(to_numpy, args)))

    return BenchCase(
        f"({rows}, {f})",
        make,
        kernels.xielu,
        nbytes=2 * rows * f * 2,
        baselines={"formula": _formula},
        check=check,
    )


# Apertus 8B: one token, a batch, a prompt.
CASES = [_case(1, 21504), _case(256, 21504), _case(8192, 21504)]
CPU_CASES = [_case(64, 2048)]
