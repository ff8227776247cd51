"""permute_columns: the kernel against the mirror, the mirror against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import DTypeError, ShapeError
from engine.testing import cases
from engine.testing.tolerances import assert_close


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("m", "n"), cases.ROWS)
def test_matches_mirror(xp, m, n, dtype):
    x = cases.normal((m, n), dtype, seed=1)
    order = np.random.default_rng(2).permutation(n).astype(np.int32)
    out, buffer = cases.guarded(xp, (m, n), x.dtype)
    kernels.permute_columns(*cases.to_module(xp, x, order), out=out)
    assert_close(out, reference.permute_columns(x, order))
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


def test_mirror_is_a_loop():
    x, order = cases.normal((3, 7), "float32", seed=1), np.array([6, 0, 9, 3, -1], np.int32)
    want = [[row[i] if 0 <= i < 7 else 0 for i in order] for row in x]
    np.testing.assert_array_equal(kernels.permute_columns(x, order), np.float32(want))


def test_the_inverse_undoes_it(xp):
    x = xp.asarray(cases.normal((20, 300), "bfloat16", seed=3))
    order = np.random.default_rng(4).permutation(300).astype(np.int32)
    inverse = xp.asarray(np.argsort(order).astype(np.int32))
    back = kernels.permute_columns(kernels.permute_columns(x, xp.asarray(order)), inverse)
    np.testing.assert_array_equal(to_numpy(back), to_numpy(x))


def test_views(xp):
    wide = xp.asarray(cases.normal((9, 100), "float16", seed=5))
    order = np.random.default_rng(6).permutation(64).astype(np.int32)
    out = xp.zeros((9, 80), np.float16)
    kernels.permute_columns(wide[:, 5:69], xp.asarray(order), out=out[:, :64])
    want = reference.permute_columns(to_numpy(wide)[:, 5:69], order)
    np.testing.assert_array_equal(to_numpy(out[:, :64]), want)
    assert not bool(out[:, 64:].any())


def test_contract():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(DTypeError, match="permutation: must be int32; got int64"):
        kernels.permute_columns(x, np.arange(3))
    with pytest.raises(ShapeError, match="permutation: must have shape"):
        kernels.permute_columns(x, np.zeros((3, 1), np.int32))
