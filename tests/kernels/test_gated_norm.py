"""gated_norm: the kernel against its mirror, the mirror against float64."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.errors import ContractError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import misaligned
from engine.testing.tolerances import assert_close

# (T, H, D): heads of a warp, of two vectors a lane, of a block; odd sizes; empty.
SHAPES = (
    (1, 16, 128),
    (5, 3, 64),
    (7, 2, 256),
    (3, 4, 192),
    (2, 1, 1024),
    (3, 2, 4096),
    (4, 3, 33),
    (2, 2, 1),
    (0, 4, 128),
)
OPTIONS = ({}, {"activation": "sigmoid", "eps": 1e-5}, {"gate_first": True})


def _case(shape, dtype, *, weight_per_head=False):
    x, z = (cases.normal(shape, dtype, seed=seed, scale=2.0) for seed in (1, 2))
    return x, z, cases.normal(shape[1 if weight_per_head else 2 :], dtype, seed=3, mean=1.0)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("options", OPTIONS, ids=str)
@pytest.mark.grid("weight_per_head", [False, True])
@pytest.mark.grid("shape", SHAPES, ids=str)
def test_matches_mirror(xp, shape, weight_per_head, options, dtype):
    arrays = _case(shape, dtype, weight_per_head=weight_per_head)
    want = reference.gated_norm(*arrays, **options)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    got = kernels.gated_norm(*cases.to_module(xp, *arrays), **options, out=out)
    assert got is out
    assert_close(got, want, reduction=shape[2])
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", [(6, 4, 128), (2, 2, 512), (3, 2, 20)], ids=str)
def test_views_and_in_place(xp, shape, dtype):
    """z is part of a wider projection; the result replaces x; misaligned rows."""
    x, z, weight = _case(shape, dtype)
    want = reference.gated_norm(x, z, weight)
    wide = xp.asarray(np.concatenate([z, z, z], axis=1))[:, shape[1] : 2 * shape[1]]
    into = xp.asarray(x.copy())
    got = kernels.gated_norm(into, wide, xp.asarray(weight), out=into)
    assert_close(got, want, reduction=shape[2])
    got = kernels.gated_norm(misaligned(xp, x), xp.asarray(z), xp.asarray(weight))
    assert_close(got, want, reduction=shape[2])


@pytest.mark.parametrize("gate_first", [False, True])
def test_mirror_is_the_formula(gate_first):
    x, z, weight = (a.astype(np.float64) for a in _case((3, 2, 40), "float32"))
    gate = z / (1 + np.exp(-z))
    h = x * gate if gate_first else x
    want = h / np.sqrt((h**2).mean(axis=2, keepdims=True) + 1e-3) * weight
    want = want if gate_first else want * gate
    got = reference.gated_norm(x, z, weight, eps=1e-3, gate_first=gate_first)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_contract(xp):
    x, weight = xp.zeros((3, 2, 8), np.float32), xp.zeros(8, np.float32)
    with pytest.raises(ShapeError, match=r"z: must have shape \(T, H, D\); H = 2 from x"):
        kernels.gated_norm(x, x[:, :1], weight)
    with pytest.raises(ShapeError, match=r"weight: must have shape \(H, D\); H = 2 from x"):
        kernels.gated_norm(x, x, xp.zeros((3, 8), np.float32))
    with pytest.raises(ContractError, match=r"activation: must be one of \('silu', 'sigmoid'\)"):
        kernels.gated_norm(x, x, weight, activation="relu")
    with pytest.raises(ContractError, match="eps: must be a number from 0"):
        kernels.gated_norm(x, x, weight, eps=-1.0)
