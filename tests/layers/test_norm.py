"""Norms of heads with weights of their own, which no op has as a whole."""

from __future__ import annotations

import numpy as np
import pytest

from engine.layers.norm import HeadNorm


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-6), ("float16", 2e-3)])
def test_heads_are_normalised_to_mean_0_and_variance_1_and_weighted(dtype, limit):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((7, 80)).astype(dtype)
    heads = rows[:, 8:68].reshape(7, 5, 12)  # a view, as of fused rows
    heads[2] *= 30
    heads[3] *= 0.01
    heads[4] = 0.25  # the epsilon alone
    weight = (5 * rng.standard_normal((5, 12))).astype(dtype)
    got = HeadNorm(weight, 1e-3)(heads)
    real = heads.astype(np.float64)
    centred = real - real.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * weight
    assert got.dtype == dtype and got.shape == heads.shape
    np.testing.assert_allclose(got, want, atol=limit * np.abs(want).max())
