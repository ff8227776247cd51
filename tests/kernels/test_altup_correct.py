"""altup_correct: the kernel against its mirror, the mirror against a loop, and the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, ShapeError
from engine.testing import cases
from engine.testing.tolerances import assert_close

# (T, S, N)
_CASES = ((1, 4, 64), (3, 4, 2048), (5, 2, 100), (2, 3, 33), (0, 4, 64), (7, 1, 40))


def _inputs(shape, dtype, seed=1):
    tokens, streams, n = shape
    p, x = cases.normal(shape, dtype, seed), cases.normal((tokens, n), dtype, seed + 1)
    norm_weight = cases.normal((n,), dtype, seed + 2, scale=0.2, mean=1.0)
    router = cases.normal((streams, n), dtype, seed + 3, scale=2.0 * math.sqrt(n))
    coefs = cases.normal((streams, streams), dtype, seed + 4, scale=0.5)
    return p, x, norm_weight, router, coefs, cases.normal((n,), dtype, seed + 5)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("has_scale", [False, True])
@pytest.mark.grid("shape", _CASES)
def test_matches_mirror(xp, shape, has_scale, dtype):
    *arrays, scale = _inputs(shape, dtype)
    want, own = reference.altup_correct(*arrays, scale=scale if has_scale else None, eps=1e-5)
    streams, *others = cases.to_module(xp, *(a.copy() for a in arrays))
    got = kernels.altup_correct(
        streams, *others, scale=xp.asarray(scale) if has_scale else None, eps=1e-5
    )
    assert_close(streams, want, reduction=shape[2])
    assert_close(got, own, reduction=shape[2])
    if not has_scale:
        np.testing.assert_array_equal(to_numpy(got), to_numpy(streams)[:, 0])


def test_mirror_is_a_loop():
    p, x, weight, router, coefs, scale = _inputs((2, 3, 8), "float32")
    got, own = reference.altup_correct(p, x, weight, router, coefs, scale=scale)
    for token in range(2):
        row = x[token].astype(np.float64)
        normed = row / math.sqrt((row * row).mean() + 1e-6) * weight
        m = [math.tanh(sum(router[s] * normed) / 8) for s in range(3)]
        step = row - p[token, 0]
        want = np.array([p[token, i] + step * (1 + sum(coefs[i] * m)) for i in range(3)])
        np.testing.assert_allclose(got[token], want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(own[token], want[0] * scale, rtol=1e-5, atol=1e-5)


def test_contract(xp):
    p, x, *others, scale = cases.to_module(xp, *_inputs((2, 4, 16), "float32"))
    op = kernels.altup_correct
    with pytest.raises(ContractError, match="streams: must be of 1 to 4 streams; got 5"):
        op(xp.ones((2, 5, 16), np.float32), x, *others)
    with pytest.raises(ShapeError, match=r"coefs: must have shape \(S, S\)"):
        op(p, x, *others[:2], others[2][:3])
    with pytest.raises(ShapeError, match="scale"):
        op(p, x, *others, scale=scale[:3])
