"""decode_outputs: microseconds to store a step's ids; latency-bound, hardly any bytes."""

from __future__ import annotations

import numpy as np

from engine import kernels
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_elementwise import assert_same


def _case(batch: int) -> BenchCase:
    def make(xp, seed):
        rng = np.random.default_rng(seed)
        ids, status = rng.integers(0, 1000, (2, batch, 1)).astype(np.int32)
        rows = rng.permutation(batch).astype(np.int32)
        return tuple(xp.asarray(a) for a in (ids, status, rows, np.zeros_like(rows)))

    def check(args, result):
        assert_same(to_numpy(args[3])[to_numpy(args[2])], to_numpy(args[0])[:, -1])
        assert_same(to_numpy(result[0]), to_numpy(args[0]))

    return BenchCase(f"B {batch}", make, kernels.decode_outputs, nbytes=batch * 24, check=check)


CASES = [_case(1), _case(256)]
