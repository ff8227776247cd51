"""decode_inputs: microseconds to lay out a step; latency-bound, hardly any bytes."""

from __future__ import annotations

import numpy as np

from engine import kernels
from engine.device import to_numpy
from engine.testing.bench_case import BenchCase
from engine.testing.cases_elementwise import assert_same

_SLOTS, _BLOCK = 256, 16


def _layout(*arrays):
    return kernels.decode_inputs(*arrays, block_size=_BLOCK)


def _case(batch: int, context: int) -> BenchCase:
    width = -(-context // _BLOCK)

    def make(xp, seed):
        rng = np.random.default_rng(seed)
        rows = rng.permutation(_SLOTS)[:batch]
        tables = rng.integers(0, 1 << 16, (_SLOTS, width))
        last_ids = rng.integers(0, 1000, _SLOTS)
        nothing = np.zeros(batch + 1)
        ids, positions = nothing[1:, None] - 1, nothing[1:, None] + context - 1
        arrays = (rows, ids, positions, last_ids, tables, nothing[1:], nothing, nothing)
        return tuple(xp.asarray(a.astype(np.int32)) for a in arrays)

    def check(args, result):
        rows, _, _, last_ids, tables = (to_numpy(a) for a in args[:5])
        assert_same(to_numpy(result[0]), last_ids[rows][:, None])
        assert_same(to_numpy(result[2]), tables[rows])

    nbytes = batch * (8 * width + 40)
    return BenchCase(f"B {batch}, context {context}", make, _layout, nbytes=nbytes, check=check)


CASES = [_case(1, 1024), _case(256, 1024), _case(1, 131072)]
