"""all_gather: ranks of one process against the mirror, and the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, ShapeError
from engine.testing import cases
from engine.testing.tolerances import assert_close
from tests.cases_collectives import PEER_SIZES, Ranks

SHAPES = ((1, 64), (3, 63), (5, 576), (7, 1), (2, 3, 130), (0, 64), (9,), (4, 4096))


def _parts(shape, dtype, size, seed=0):
    return [cases.normal(shape, dtype, seed=seed + 10 * r) for r in range(size)]


def _run(xp, parts, ranks=None):
    if xp is np:
        return [kernels.all_gather(x, parts) for x in parts]
    ranks = ranks or Ranks(len(parts))
    shape = (*parts[0].shape[:-1], len(parts) * parts[0].shape[-1])
    arrays, outs = ranks.move(parts), ranks.move([np.full(shape, 7, x.dtype) for x in parts])
    ranks.run(lambda r, memory: kernels.all_gather(arrays[r], memory, out=outs[r]))
    assert [memory.missing() for memory in ranks.memories] == [None] * len(parts)
    return outs


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("size", PEER_SIZES)
def test_matches_mirror_in_every_rank(xp, size, dtype):
    ranks = None if xp is np else Ranks(size)
    for shape in SHAPES:
        parts = _parts(shape, dtype, size)
        want = reference.all_gather(parts[0], parts)
        for got in _run(xp, parts, ranks):
            np.testing.assert_array_equal(to_numpy(got), want)
            assert_close(got, want)


@pytest.mark.gpu
def test_rows_larger_than_a_buffer_together(cp):
    for n in (64, 63):
        parts = _parts((50, n), "float32", 3)
        want = reference.all_gather(parts[0], parts)
        for got in _run(cp, parts, Ranks(3, capacity=4096)):
            np.testing.assert_array_equal(to_numpy(got), want)


@pytest.mark.gpu
def test_a_row_larger_than_a_buffer_is_an_error(cp):
    ranks = Ranks(1, capacity=4096)
    with pytest.raises(ContractError, match="x: must be at most 4096 bytes a row"):
        kernels.all_gather(cp.zeros((1, 4096), np.float32), ranks.memories[0])


@pytest.mark.gpu
def test_replayed_graphs_with_sums_in_between(cp):
    ranks = Ranks(2)
    parts = _parts((5, 512), "float16", 2)
    arrays = ranks.move(parts)
    sums, outs = (ranks.move([np.zeros((5, n), np.float16)] * 2) for n in (512, 1024))

    def call(rank, memory):
        kernels.all_reduce(arrays[rank], memory, out=sums[rank])
        kernels.all_gather(sums[rank], memory, out=outs[rank])

    ranks.run(call)
    graphs = ranks.captured(call)
    for _ in range(5):
        ranks.replay(graphs)
    ranks.synchronize()
    total = reference.all_reduce(parts[0], parts)
    for got in outs:
        np.testing.assert_array_equal(to_numpy(got), reference.all_gather(total, [total, total]))


def test_one_rank_is_a_copy():
    x = cases.normal((3, 5), "float32", seed=1)
    np.testing.assert_array_equal(kernels.all_gather(x, [x]), x)


def test_contract():
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ShapeError, match=r"peers\[1\]: must have shape \(2, 8\); got \(2, 4\)"):
        kernels.all_gather(x, [x, x[:, :4]])
    with pytest.raises(ShapeError, match=r"out: must have shape \(2, 16\)"):
        kernels.all_gather(x, [x, x], out=np.zeros((2, 8), np.float32))
