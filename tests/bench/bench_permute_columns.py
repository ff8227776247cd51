"""permute_columns in bfloat16: GB/s of permuting the columns of few and of many rows."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close
from tests.bench.bench_gemm import filled


def _check(args, result):
    few = slice(0, 64)
    want = reference.permute_columns(to_numpy(args[0][few]), to_numpy(args[1]))
    assert_close(to_numpy(result[few]).copy(), want)


def _case(m: int, k: int) -> BenchCase:
    def make(xp, seed):
        order = np.random.default_rng(seed).permutation(k).astype(np.int32)
        return filled(xp, (m, k), seed), *cases.to_module(xp, order, None)[:1]

    return BenchCase(
        f"M={m} K={k}",
        make,
        kernels.permute_columns,
        nbytes=4 * m * k + 4 * k,
        baselines={"x[:, order]": lambda x, order: x[:, order]},
        check=_check,
    )


CASES = [_case(1, 4096), _case(16, 14336), _case(4096, 4096)]
