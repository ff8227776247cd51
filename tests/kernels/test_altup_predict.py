"""altup_predict: the kernel against its mirror, the mirror against a loop, and the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.tolerances import assert_close

# (T, S, N)
_CASES = ((1, 4, 64), (3, 4, 2048), (5, 2, 100), (2, 3, 33), (0, 4, 64), (7, 1, 40))


def _inputs(shape, dtype, seed=1):
    tokens, streams, n = shape
    h = cases.normal(shape, dtype, seed)
    norm_weight = cases.normal((n,), dtype, seed + 1, scale=0.2, mean=1.0)
    router = cases.normal((streams, n), dtype, seed + 2, scale=2.0 * math.sqrt(n))
    coefs = cases.normal((streams * streams, streams), dtype, seed + 3, scale=0.5)
    return h, norm_weight, router, coefs, cases.normal((tokens, n), dtype, seed + 4)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("has_delta", [False, True])
@pytest.mark.grid("shape", _CASES)
def test_matches_mirror(xp, shape, has_delta, dtype):
    *arrays, delta = _inputs(shape, dtype)
    delta = delta if has_delta else None
    want, own = reference.altup_predict(*arrays, delta=delta, eps=1e-5)
    streams, *others = cases.to_module(xp, *(a.copy() for a in arrays))
    got = kernels.altup_predict(
        streams, *others, delta=cases.to_module(xp, delta) if has_delta else None, eps=1e-5
    )
    assert_close(streams, want, reduction=shape[2])
    assert_close(got, own, reduction=shape[2])
    np.testing.assert_array_equal(to_numpy(got), to_numpy(streams)[:, 0])


def test_mirror_is_a_loop():
    h, weight, router, coefs, delta = (a.astype(np.float64) for a in _inputs((2, 3, 8), "float32"))
    for token in range(2):
        x = h[token, 0]
        normed = x / math.sqrt((x * x).mean() + 1e-6) * weight
        m = [math.tanh(sum(router[s] * normed) / 8) for s in range(3)]
        mixing = np.array([sum(row * m) for row in coefs]).reshape(3, 3)
        before = h[token] + np.array([0, 1, 1])[:, None] * delta[token]
        want = [before[i] + sum(mixing[i, j] * before[j] for j in range(3)) for i in range(3)]
        one = (a[token : token + 1].astype(np.float32) for a in (h, delta))
        row, added = one
        others = (a.astype(np.float32) for a in (weight, router, coefs))
        got, _ = reference.altup_predict(row, *others, delta=added)
        np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)


def test_contract(xp):
    h, *others, delta = cases.to_module(xp, *_inputs((2, 4, 16), "float32"))
    op = kernels.altup_predict
    with pytest.raises(ContractError, match="streams: must be of 1 to 4 streams; got 5"):
        op(xp.ones((2, 5, 16), np.float32), *others)
    with pytest.raises(ShapeError, match=r"coefs: must have shape \(16, S\)"):
        op(h, *others[:2], others[2][:15])
    with pytest.raises(ShapeError, match="delta"):
        op(h, *others, delta=delta[:1])
    with pytest.raises(DTypeError, match="router: must be float32; got float16"):
        op(h, others[0], others[1].astype(np.float16), others[2])
