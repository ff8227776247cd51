"""Mirrors compute float64 arrays in float64, for gradient checks; the GPU has no float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels
from engine.errors import DTypeError

_RNG = np.random.default_rng(0)
_X = _RNG.standard_normal((5, 12)) * 2.0
_XIELU = np.array([0.9, 1.3, 0.4, -0.02])
_W, _B = _RNG.standard_normal((2, 12))


def _elementwise(function, x=_X):
    return np.vectorize(function)(x)


def _silu(x):
    return x / (1 + math.exp(-x))


def _gelu_erf(x):
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def _gelu_tanh(x):
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _xielu(x):
    positive, negative, slope, eps = _XIELU.tolist()
    curve = positive * x * x if x > 0 else negative * (math.expm1(min(x, eps)) - x)
    return curve + slope * x


def _gated(activation):
    return _elementwise(activation, _X[:, :6]) * _X[:, 6:]


def _rms(x):
    return np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6)


_H = 0.22 * _X + _X[::-1]
_CENTRED = _X - _X.mean(axis=1, keepdims=True)
_CASES = {
    "silu": (lambda: kernels.silu(_X), _elementwise(_silu)),
    "gelu": (lambda: kernels.gelu(_X), _elementwise(_gelu_erf)),
    "gelu_tanh": (lambda: kernels.gelu(_X, approximate="tanh"), _elementwise(_gelu_tanh)),
    "relu": (lambda: kernels.relu(_X), np.where(_X > 0, _X, 0.0)),
    "relu_squared": (lambda: kernels.relu(_X, squared=True), np.where(_X > 0, _X**2, 0.0)),
    "clamp": (lambda: kernels.clamp(_X, -0.3, 0.7), np.minimum(np.maximum(_X, -0.3), 0.7)),
    "xielu": (lambda: kernels.xielu(_X, _XIELU), _elementwise(_xielu)),
    "swiglu": (lambda: kernels.swiglu(_X), _gated(_silu)),
    "geglu": (lambda: kernels.geglu(_X, approximate="none"), _gated(_gelu_erf)),
    "geglu_tanh": (lambda: kernels.geglu(_X), _gated(_gelu_tanh)),
    "rmsnorm": (lambda: kernels.rmsnorm(_X, _W, weight_offset=0.1), _X / _rms(_X) * (_W + 0.1)),
    "rmsnorm_residual": (
        lambda: kernels.rmsnorm(_X, _W, residual=_X[::-1], x_scale=0.22)[0],
        _H / _rms(_H) * _W,
    ),
    "layernorm": (
        lambda: kernels.rmsnorm(_X, _W, bias=_B, subtract_mean=True),
        _CENTRED / _rms(_CENTRED) * _W + _B,
    ),
    "embedding": (
        lambda: kernels.embedding(np.array([4, 0, 4], np.int32), _X, scale=1 / 3),
        _X[[4, 0, 4]] / 3,
    ),
}


@pytest.mark.parametrize("case", _CASES)
def test_float64_is_computed_in_float64(case):
    call, want = _CASES[case]
    got = call()
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_in_float64(interleaved):
    q = _RNG.standard_normal((3, 2, 8))
    angles = np.arange(12.0).reshape(3, 4)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions = np.array([2, 0, 1], np.int32)
    got, _ = kernels.rope(q, q, positions, table, interleaved=interleaved)
    turn = (table[:, :4].astype(np.float64) + 1j * table[:, 4:])[positions][:, None]
    pairs = q[..., ::2] + 1j * q[..., 1::2] if interleaved else q[..., :4] + 1j * q[..., 4:]
    turned = pairs * turn
    parts = [turned.real, turned.imag]
    want = np.stack(parts, -1).reshape(q.shape) if interleaved else np.concatenate(parts, -1)
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15)


def test_attention_in_float64():
    """Of two tokens after 18, dense and in pages of 16; the gradients have tests of their own."""
    q = _RNG.standard_normal((2, 2, 8))
    k, v = _RNG.standard_normal((2, 20, 1, 8))
    sinks = _RNG.standard_normal(2)
    scores = 1.5 * np.tanh(np.einsum("ihd,jd->ihj", q, k[:, 0]) * 8**-0.5 / 1.5)
    scores[0, :, 19] = -np.inf
    weights = np.exp(scores)
    total = weights.sum(-1) + np.exp(sinks)
    want = weights @ v[:, 0] / total[..., None]
    rule = {"softcap": 1.5, "sinks": sinks, "return_lse": True}
    starts = {f"cu_seqlens_{x}": np.array([0, n], np.int32) for x, n in (("q", 2), ("k", 20))}
    dense = kernels.attention_prefill(q, k, v, **starts, **rule)
    pages = np.zeros((2, 2, 1, 16, 8))
    for page, x in zip(pages, (k, v), strict=True):
        page[:, 0].reshape(32, 8)[:20] = x[:, 0]
    where = {"block_tables": np.array([[0, 1]], np.int32), "context_lens": np.array([20], np.int32)}
    out, lse = kernels.attention_decode(q[None], *pages, **where, **rule)
    for got in (dense, (out[0], lse[0])):
        for x, wanted in zip(got, (want, np.log(total)), strict=True):
            assert x.dtype == np.float64
            np.testing.assert_allclose(x, wanted, rtol=1e-13, atol=1e-15)


@pytest.mark.gpu
def test_float64_on_the_gpu_is_an_error(cp):
    wanted = "x: must be float32 or float16 or bfloat16; got float64; float64 must be a NumPy array"
    with pytest.raises(DTypeError, match=wanted):
        kernels.silu(cp.asarray(_X))
