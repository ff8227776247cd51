"""mla_store: the kernel against its mirror, the mirror against the separate ops, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.tolerances import assert_close

# (T, H, L, R, block_size)
SHAPES = (
    (1, 16, 512, 64, 16),
    (5, 128, 512, 64, 64),
    (7, 20, 256, 32, 32),
    (3, 5, 24, 8, 16),
    (4, 3, 19, 6, 16),
    (2, 3, 24, 262, 16),
    (0, 4, 64, 64, 16),
)


def _inputs(shape, dtype):
    """Return the arguments; the first token is not stored, the others go to shuffled slots."""
    num_tokens, num_heads, latent, rope, block_size = shape
    rng = np.random.default_rng(4)
    slots = rng.permutation(4 * block_size)[:num_tokens].astype(np.int64)
    slots[:1] = -1
    angles = rng.uniform(-3, 3, (50, rope // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return (
        cases.normal((num_tokens, num_heads, rope), dtype, seed=1),
        cases.normal((num_tokens, latent + rope), dtype, seed=2, scale=3.0),
        cases.normal((latent,), dtype, seed=3, mean=1.0),
        rng.integers(0, 50, num_tokens).astype(np.int32),
        table,
        cases.normal((4, block_size, latent + rope), dtype, seed=5),
        slots,
    )


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, dtype):
    want = [x.copy() for x in _inputs(shape, dtype)]
    reference.mla_store(*want, eps=1e-5)
    got = cases.to_module(xp, *_inputs(shape, dtype))
    kernels.mla_store(*got, eps=1e-5)
    for index in (0, 1, 5):
        assert_close(got[index], want[index], reduction=shape[2])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_views(xp, dtype):
    """The rotated part of wider queries, rows of a fused product, one of several layers' pages."""
    shape = (5, 6, 128, 32, 16)
    want = [x.copy() for x in _inputs(shape, dtype)]
    reference.mla_store(*want)
    q_rope, kv, weight, positions, table, pages, slots = cases.to_module(xp, *_inputs(shape, dtype))
    queries, fused = xp.zeros((5, 6, 80), q_rope.dtype), xp.zeros((5, 200), kv.dtype)
    layers = xp.zeros((4, 2, 16, 160), pages.dtype)
    queries[..., 48:], fused[:, 40:], layers[:, 1] = q_rope, kv, pages
    places = (positions, table, layers[:, 1], slots)
    kernels.mla_store(queries[..., 48:], fused[:, 40:], weight, *places)
    for got, index in ((queries[..., 48:], 0), (fused[:, 40:], 1), (layers[:, 1], 5)):
        assert_close(got.copy(), want[index], reduction=128)
    for rest in (queries[..., :48], fused[:, :40], layers[:, 0]):
        assert not to_numpy(rest).any()


def test_mirror_is_the_formula():
    q_rope, kv, weight, positions, table, pages, slots = _inputs((3, 2, 24, 8, 16), "float32")
    arguments = [x.copy() for x in (q_rope, kv, weight, positions, table, pages, slots)]
    reference.mla_store(*arguments, eps=0.1)
    for t in range(3):
        latent = kv[t, :24].astype(np.float64)
        want = latent / np.sqrt(np.mean(latent**2) + 0.1) * weight
        np.testing.assert_allclose(arguments[1][t, :24], want, rtol=1e-5)
        turn = table[positions[t], :4] + 1j * table[positions[t], 4:]
        for got, x in ((arguments[1][t, 24:], kv[t, 24:]), (arguments[0][t, 1], q_rope[t, 1])):
            np.testing.assert_allclose(got[:4] + 1j * got[4:], (x[:4] + 1j * x[4:]) * turn, 1e-5)
        if slots[t] >= 0:
            np.testing.assert_array_equal(arguments[5].reshape(-1, 32)[slots[t]], arguments[1][t])


@pytest.mark.gpu
def test_values_outside(cp):
    """A position outside the table gives NaN, a slot outside the pages is skipped."""
    arguments = cases.to_module(cp, *_inputs((3, 2, 24, 8, 16), "float32"))
    q_rope, kv, _, positions, _, pages, slots = arguments
    positions[:], slots[:] = cp.asarray([50, -1, 3]), cp.asarray([64, 2**40, 5])
    before = pages.copy()
    kernels.mla_store(*arguments)
    assert bool(cp.isnan(q_rope[:2]).all() & cp.isnan(kv[:2, 24:]).all())
    assert bool(cp.isfinite(kv[:2, :24]).all() & cp.isfinite(q_rope[2]).all())
    changed = (pages != before).reshape(64, -1).any(axis=1)
    assert cp.nonzero(changed)[0].tolist() == [5]


def test_contract(xp):
    q_rope, kv, weight, *places = cases.to_module(xp, *_inputs((3, 2, 24, 8, 16), "float32"))
    op = kernels.mla_store
    with pytest.raises(ContractError, match=r"kv: must be of width L \+ R = 31; got 32"):
        op(q_rope, kv, weight[:23], *places)
    with pytest.raises(DTypeError, match="weight: must be float32; got float16"):
        op(q_rope, kv, weight.astype(np.float16), *places)
    with pytest.raises(ShapeError, match=r"kv: must have shape \(T, W\); T = 3 from q_rope"):
        op(q_rope, kv[:2], weight, *places)
    positions, table, pages, slots = places
    with pytest.raises(ContractError, match="pages: must be pages of contiguous tokens"):
        op(q_rope, kv, weight, positions, table, pages[:, ::2], slots)
    if xp is np:
        with pytest.raises(ContractError, match=r"positions: must be in \[0, 50\)"):
            op(q_rope, kv, weight, positions + np.int32(50), table, pages, slots)
        with pytest.raises(ContractError, match=r"slot_mapping: must be in \[-1, 64\)"):
            op(q_rope, kv, weight, positions, table, pages, slots + 64)
