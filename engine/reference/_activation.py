"""Activations of the mirrors, in x's dtype: the formulas of `cuda_src/common/activation.cuh`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

from engine.dtypes import accumulation_dtype

__all__ = ["apply", "erfc", "gated_backward", "gelu_erf", "gelu_erf_slope", "gelu_tanh"]
__all__ += ["gelu_tanh_slope", "relu", "relu_slope", "relu_squared", "sigmoid", "silu"]
__all__ += ["silu_slope"]

Array = np.ndarray[Any, Any]

_MIN_T = 1 / 6  # t at |x| = 10, beyond which erfc is zero in float32
_DEGREE = 10


def apply(activation: Callable[[Array], Array], x: Array) -> Array:
    """Apply `activation` in float32, or float64 for float64, and round once to x's dtype."""
    return np.asarray(activation(x.astype(accumulation_dtype(x.dtype), copy=False)), x.dtype)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp may overflow; 1 / inf is 0
        y: Array = 1 / (1 + np.exp(-x))
    return y


def silu(x: Array) -> Array:
    """x / (1 + exp(-x))."""
    with np.errstate(over="ignore", invalid="ignore"):  # exp may overflow; x / inf is 0
        y: Array = x / (1 + np.exp(-x))
    return y


def gelu_tanh(x: Array) -> Array:
    """x (1 + tanh u) / 2 = x / (1 + exp(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3)."""
    with np.errstate(over="ignore", invalid="ignore"):
        twice_u = 2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)
        y: Array = x / (1 + np.exp(-twice_u))
    return y


def gelu_erf(x: Array) -> Array:
    """x (1 + erf(x / sqrt 2)) / 2 = x erfc(-x / sqrt 2) / 2."""
    with np.errstate(invalid="ignore"):
        y: Array = 0.5 * x * erfc(-math.sqrt(0.5) * x)
    return y


def relu(x: Array) -> Array:
    """max(x, 0); NaN stays NaN."""
    y: Array = np.maximum(x, 0)
    return y


def relu_squared(x: Array) -> Array:
    """max(x, 0)^2; NaN stays NaN."""
    with np.errstate(over="ignore"):
        return relu(x) ** 2


def silu_slope(x: Array) -> Array:
    """Derivative of `silu`."""
    return _slope_of_product(x, x, np.ones_like(x))


def gelu_tanh_slope(x: Array) -> Array:
    """Derivative of `gelu_tanh`."""
    factor = 2 * math.sqrt(2 / math.pi)
    with np.errstate(over="ignore"):
        cubic = 0.044715 * np.minimum(x * x, 1e4)  # finite; the sigmoid is 0 or 1 there
        return _slope_of_product(x, factor * x * (1 + cubic), factor * (1 + 3 * cubic))


def gelu_erf_slope(x: Array) -> Array:
    """Derivative of `gelu_erf`: P(X < x) + x p(x) for a standard normal X of density p."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        density = math.sqrt(0.5 / math.pi) * np.exp(-0.5 * x * x)
        y: Array = 0.5 * erfc(-math.sqrt(0.5) * x) + x * density
    return y


def relu_slope(x: Array) -> Array:
    """1 where x > 0 or x is NaN, else 0."""
    return np.asarray(~(x <= 0), x.dtype)


def _slope_of_product(x: Array, z: Array, z_slope: Array) -> Array:
    """Derivative of x sigmoid(z); e = exp(-|z|) neither overflows nor cancels in the tails."""
    with np.errstate(invalid="ignore", under="ignore"):
        e = np.exp(-np.abs(z))
        r = 1 / (1 + e)
        y: Array = np.where(z >= 0, r, e * r) + x * (e * r * r) * z_slope
    return y


def gated_backward(
    dout: Array, x: Array, activation: Callable[[Array], Array], slope: Callable[[Array], Array]
) -> Array:
    """Gradient of activation(gate) * up with respect to x = [gate | up]; rounded once."""
    real = accumulation_dtype(x.dtype)
    gate, up = np.split(x.astype(real, copy=False), 2, axis=-1)
    upstream = dout.astype(real, copy=False)
    with np.errstate(invalid="ignore"):
        parts = [upstream * up * slope(gate), upstream * activation(gate)]
    return np.concatenate(parts, axis=-1).astype(x.dtype)


def erfc(x: Array) -> Array:
    """1 - erf(x), with a relative error below 2e-6 for |x| < 3 (absolute error below 4e-7).

    NumPy has no erf, and `math.erfc` is too slow for whole layers. With a = |x| and
    t = 1 / (1 + a/2), erfc(a) = t exp(p(t) - a^2); the smooth p is interpolated by a polynomial.
    In float64, for gradient checks, it is `math.erfc`.
    """
    if x.dtype == np.float64:
        exact: Array = np.vectorize(math.erfc, otypes=[np.float64])(x)
        return exact
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        a = np.abs(x)
        t = 1 / (1 + np.float32(0.5) * a)
        s = (t - np.float32(_MIN_T)) * np.float32(2 / (1 - _MIN_T)) - 1
        first, *others = _coefficients()
        p = np.full_like(s, first)
        for coefficient in others:
            p = p * s + coefficient
        y: Array = t * np.exp(p - a * a)
        return np.where(x < 0, 2 - y, y)


@cache
def _coefficients() -> tuple[np.float32, ...]:
    """Return the coefficients of p in s in [-1, 1], highest degree first, from Chebyshev nodes."""

    nodes = chebyshev.chebpts1(_DEGREE + 1)
    t = _MIN_T + (nodes + 1) * (1 - _MIN_T) / 2
    scaled = [math.erfc(a) * math.exp(a * a) for a in 2 / t - 2]
    series = chebyshev.chebfit(nodes, np.log(scaled / t), _DEGREE)
    return tuple(np.float32(c) for c in chebyshev.cheb2poly(series)[::-1])
