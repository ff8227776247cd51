"""all_reduce_rmsnorm: ranks of one process against the two ops, and the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ShapeError
from engine.kernels.all_reduce_rmsnorm import choose_size
from engine.testing import cases
from engine.testing.tolerances import assert_close
from tests.cases_collectives import PEER_SIZES, Ranks

NUMBERS = {"eps": 1e-5, "x_scale": 0.5, "weight_offset": 1.0}
WIDTHS = (64, 576, 1000, 1024, 2048, 4096, 8192, 12_288, 63, 40_000)


def _inputs(shape, dtype, size):
    parts = [cases.normal(shape, dtype, seed=10 * r) for r in range(size)]
    residual = cases.normal(shape, dtype, seed=3, scale=3.0)
    return parts, residual, cases.normal(shape[-1:], dtype, seed=4)


def _run(xp, parts, residual, weight, ranks=None, numbers=NUMBERS):
    """Return (y, h) of every rank."""
    if xp is np:
        return [kernels.all_reduce_rmsnorm(x, parts, residual, weight, **numbers) for x in parts]
    ranks = ranks or Ranks(len(parts))
    size = len(parts)
    arrays, residuals, weights = map(ranks.move, (parts, [residual] * size, [weight] * size))
    ys, hs = (ranks.move([np.full_like(residual, 7)] * size) for _ in range(2))

    with ranks.on(0):  # preload: loading later would deadlock with a waiting rank
        kernels.rmsnorm(arrays[0], weights[0], residual=residuals[0])

    def call(r, memory):
        where = {"out": ys[r], "residual_out": hs[r]}
        kernels.all_reduce_rmsnorm(arrays[r], memory, residuals[r], weights[r], **where, **numbers)

    ranks.run(call)
    assert [memory.missing() for memory in ranks.memories] == [None] * size
    return list(zip(ys, hs, strict=True))


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("size", PEER_SIZES)
def test_matches_mirror_in_every_rank(xp, size, dtype):
    ranks = None if xp is np else Ranks(size)
    for n in WIDTHS if size == 2 else (576, 63):
        inputs = _inputs((5, n), dtype, size)
        want_y, want_h = reference.all_reduce_rmsnorm(inputs[0][0], *inputs, **NUMBERS)
        for y, h in _run(xp, *inputs, ranks):
            np.testing.assert_array_equal(to_numpy(h), want_h)
            assert_close(y, want_y, reduction=n)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 4096), (100, 576), (2, 3, 8192), (0, 64)])
def test_has_the_bits_of_the_two_ops(xp, shape, dtype):
    parts, residual, weight = _inputs(shape, dtype, 2)
    total = xp.asarray(reference.all_reduce(parts[0], parts))
    want = kernels.rmsnorm(total, xp.asarray(weight), residual=xp.asarray(residual), **NUMBERS)
    for got in _run(xp, parts, residual, weight):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


@pytest.mark.gpu
def test_more_rows_than_blocks_and_than_a_buffer(cp):
    inputs = _inputs((77, 1024), "bfloat16", 2)
    want_y, want_h = reference.all_reduce_rmsnorm(inputs[0][0], *inputs, **NUMBERS)
    for y, h in _run(cp, *inputs, Ranks(2, capacity=1 << 15)):
        np.testing.assert_array_equal(to_numpy(h), want_h)
        assert_close(y, want_y, reduction=1024)


@pytest.mark.gpu
def test_in_place_in_replayed_graphs(cp):
    """Carry the residual through all replays, as through the layers of a model."""
    ranks = Ranks(2)
    parts, residual, weight = _inputs((3, 2048), "float32", 2)
    arrays, residuals = ranks.move(parts), ranks.move([residual, residual])
    weights, ys = ranks.move([weight, weight]), ranks.move([residual, residual])

    def call(r, memory):
        kernels.all_reduce_rmsnorm(
            arrays[r], memory, residuals[r], weights[r], out=ys[r], residual_out=residuals[r]
        )

    ranks.run(call)
    graphs = ranks.captured(call)
    for _ in range(7):
        ranks.replay(graphs)
    ranks.synchronize()
    h = residual
    for _ in range(8):
        y, h = reference.all_reduce_rmsnorm(parts[0], parts, h, weight)
    for rank in range(2):
        np.testing.assert_array_equal(to_numpy(residuals[rank]), h)
        assert_close(ys[rank], y, reduction=2048)


def test_mirror_is_the_two_mirrors():
    parts, residual, weight = _inputs((4, 50), "float16", 3)
    got = reference.all_reduce_rmsnorm(parts[0], parts, residual, weight, **NUMBERS)
    total = reference.all_reduce(parts[0], parts)
    want = reference.rmsnorm(total, weight, residual=residual, **NUMBERS)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_choices():
    assert choose_size(1024, is_aligned=True) == 1
    assert choose_size(8208, is_aligned=True) == 16
    assert choose_size(1 << 16, is_aligned=True) is None
    assert choose_size(1000, is_aligned=True) is None


def test_contract():
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ShapeError, match=r"residual: must have shape \(2, 8\); got \(8,\)"):
        kernels.all_reduce_rmsnorm(x, [x], x[0], x[0])
    with pytest.raises(ShapeError, match=r"weight: .* N = 8 from x; got \(4,\)"):
        kernels.all_reduce_rmsnorm(x, [x], x, x[0, :4])
