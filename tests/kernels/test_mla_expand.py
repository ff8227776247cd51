"""mla_expand: the kernel against its mirror, bit by bit, and the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, ShapeError
from engine.testing import cases

# (T, H, N, R, V): V columns of `up` are not keys
SHAPES = ((5, 128, 128, 64, 128), (3, 20, 192, 64, 256), (9, 4, 64, 32, 64), (7, 3, 5, 2, 6))
SHAPES += ((0, 4, 64, 64, 64),)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, dtype):
    num_tokens, num_heads, nope, rope, values = shape
    up = cases.normal((num_tokens, num_heads, nope + values), dtype, seed=1)
    rows = cases.normal((num_tokens, 16 + rope), dtype, seed=2)
    want = reference.mla_expand(up, rows[:, 16:], nope_dim=nope)
    up, rows = cases.to_module(xp, up, rows)
    got = kernels.mla_expand(up, rows[:, 16:], nope_dim=nope)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(to_numpy(got), want)


def test_views_of_some_heads(xp):
    up = cases.normal((4, 6, 24), "float32", seed=1)
    rope = cases.normal((4, 8), "float32", seed=2)
    want = reference.mla_expand(up[:, 2:5].copy(), rope, nope_dim=16)
    got = kernels.mla_expand(xp.asarray(up)[:, 2:5], xp.asarray(rope), nope_dim=16)
    np.testing.assert_array_equal(to_numpy(got), want)
    np.testing.assert_array_equal(want[2, 1], [*up[2, 3, :16], *rope[2]])


def test_contract(xp):
    up, rope = xp.zeros((3, 2, 8), np.float32), xp.zeros((3, 2), np.float32)
    with pytest.raises(ContractError, match="nope_dim: must be from 1 to 7; got 8"):
        kernels.mla_expand(up, rope, nope_dim=8)
    with pytest.raises(ShapeError, match=r"k_rope: must have shape \(T, R\); T = 3 from up"):
        kernels.mla_expand(up, rope[:2], nope_dim=4)
