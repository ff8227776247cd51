"""embedding, bfloat16: GB/s of rows read and written, vs CuPy's or NumPy's take()."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference
from engine.device import to_numpy
from engine.testing import cases
from engine.testing.bench_case import BenchCase
from engine.testing.tolerances import assert_close

_VOCAB = 32768


def _take(ids, weight):
    return weight.view(np.uint16).take(ids, axis=0)


def _case(tokens: int, n: int) -> BenchCase:
    def make(xp, seed):
        ids = np.random.default_rng(seed).integers(0, _VOCAB, tokens).astype(np.int32)
        row = cases.normal((1, n), "bfloat16", seed)
        weight = xp.repeat(xp.asarray(row.view(np.uint16)), _VOCAB, axis=0).view(row.dtype)
        return xp.asarray(ids), weight

    def check(args, result):
        few = slice(0, 1024)
        want = reference.embedding(to_numpy(args[0][few]), to_numpy(args[1]))
        assert_close(result[few], want)

    nbytes = tokens * (2 * n * 2 + 4)
    name = f"T {tokens}, N {n}"
    return BenchCase(
        name, make, kernels.embedding, nbytes=nbytes, baselines={"take": _take}, check=check
    )


CASES = [
    _case(1, 2048),
    _case(64, 2048),
    _case(256, 2048),
    _case(8192, 2048),
    _case(16384, 2048),
    _case(16384, 4096),
]
