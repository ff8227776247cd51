"""RMSNorm and LayerNorm on JAX's arrays, with a fused residual add."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from engine import kernels
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._gradients import (
    accumulation_dtype,
    differentiable,
    formulas_gradient,
)
from engine.integrations.jax._operators import Shapes, define, like
from engine.kernels._contract import MIRROR_FLOATS

__all__ = ["layernorm", "rmsnorm"]


def _results(x: Any, weight: Any, bias: Any, residual: Any, **_: Any) -> Shapes:
    return [like(x)] * (1 if residual is None else 2)


def _function(x: Any, weight: Any, bias: Any, residual: Any, **options: Any) -> Any:
    return kernels.rmsnorm(x, weight, bias=bias, residual=residual, **options)


def _formula(
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    *,
    eps: float,
    x_scale: float,
    weight_offset: float,
    subtract_mean: bool,
) -> Any:
    dtype = accumulation_dtype(x)
    h = x
    if residual is not None:
        h = (x_scale * x.astype(dtype) + residual.astype(dtype)).astype(x.dtype)
    centred = h.astype(dtype)
    if subtract_mean:
        centred -= centred.mean(axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + eps)
    y *= weight.astype(dtype) + weight_offset
    if bias is not None:
        y += bias.astype(dtype)
    return [y.astype(x.dtype)] if residual is None else [y.astype(x.dtype), h]


def _backward_results(
    dy: Any, h: Any, weight: Any, dh: Any, *, subtract_mean: bool, **_: Any
) -> Shapes:
    row = like(weight)
    return [like(h), row, *([row] if subtract_mean else [])]


def _backward_function(dy: Any, h: Any, weight: Any, dh: Any, **options: Any) -> Any:
    return kernels.rmsnorm_backward(dy, h, weight, dh=dh, **options)


def _backward_formula(dy: Any, h: Any, weight: Any, dh: Any, **options: Any) -> Any:
    arrays = (h, weight, weight if options["subtract_mean"] else None, None)
    gradients = formulas_gradient(_formula, options | {"x_scale": 1.0}, arrays, (dy,))
    dx = gradients[0] if dh is None else gradients[0] + dh
    return (dx, *gradients[1 : 3 if options["subtract_mean"] else 2])


def _kept(arrays: Any, results: Any) -> Any:
    x, weight, bias, residual = arrays
    return x if residual is None else results[1], weight, bias


def _gradient(options: Any, kept: Any, cotangents: Any) -> Any:
    h, weight, bias = kept
    dy, *dh = cotangents
    backward_options = {name: value for name, value in options if name != "x_scale"}
    x_scale = dict(options)["x_scale"]
    arrays = (dy, h, weight, dh[0] if dh else None)
    dx, dweight, *dbias = _NORM_BACKWARD(tuple(backward_options.items()), *arrays)
    dresidual = dx if dh else None
    dx = dx if x_scale == 1.0 else (dx * x_scale).astype(dx.dtype)
    return dx, dweight, None if bias is None else dbias[0], dresidual


# The weight's gradient is a sum over rows: a batch of them cannot be folded.
_NORM_BACKWARD = differentiable(
    define("rmsnorm_backward", _backward_function, _backward_results, formula=_backward_formula),
    _backward_formula,
)
_NORM = differentiable(
    define("rmsnorm", _function, _results, rows=(0, 3)), _formula, _gradient, _kept
)


def rmsnorm(
    x: Any,
    weight: Any,
    eps: float = 1e-6,
    *,
    residual: Any = None,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
) -> Any:
    """Normalise the last axis by its root mean square. See `engine.kernels.rmsnorm`.

    Parameters
    ----------
    x : (..., N) array of float32, float16 or bfloat16; on CPUs also float64
    weight : (N,) array
        Cast to x's dtype.
    eps : float
        Added to the mean square.
    residual : (..., N) array of x's dtype, optional
        Added to ``x_scale * x`` first; the sum is rounded to x's dtype.
    x_scale : float
        Factor on `x` in that sum; must be 1 without `residual`.
    weight_offset : float
        Added to `weight` (Gemma stores w - 1).

    Returns
    -------
    y : (..., N) array of x's dtype
    h : (..., N) array of x's dtype
        The sum ``x_scale * x + residual``; returned only if `residual` is given.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        When the call is traced. The message names the argument.

    Examples
    --------
    >>> rmsnorm(jnp.array([[3.0, 4.0]]), jnp.ones(2), eps=0.0)
    Array([[0.848..., 1.131...]], dtype=float32)
    """
    return _normalised("rmsnorm", x, weight, None, eps, residual, x_scale, weight_offset)


def layernorm(
    x: Any,
    weight: Any,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    residual: Any = None,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
) -> Any:
    """Normalise the last axis to mean 0 and variance 1. See `rmsnorm` for the other parameters.

    Parameters
    ----------
    bias : (N,) array, optional
        Added last; cast to x's dtype.

    Examples
    --------
    >>> layernorm(jnp.array([[1.0, 3.0]]), jnp.ones(2), eps=0.0)
    Array([[-1.,  1.]], dtype=float32)
    """
    return _normalised("layernorm", x, weight, bias, eps, residual, x_scale, weight_offset)


def _normalised(
    name: str,
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    residual: Any,
    x_scale: float,
    weight_offset: float,
) -> Any:
    call = TraceContract(name)
    x = call.array("x", x, "* N", MIRROR_FLOATS)
    weight = call.array("weight", weight, "N", MIRROR_FLOATS).astype(x.dtype)
    if bias is not None:
        bias = call.array("bias", bias, "N", MIRROR_FLOATS).astype(x.dtype)
    if residual is not None:
        residual = call.array("residual", residual, " ".join(map(str, x.shape)), x.dtype)
    call.check("x_scale", residual is not None or x_scale == 1.0, "1 without residual", x_scale)
    options = {
        "eps": call.number("eps", eps, low=0.0),
        "subtract_mean": name == "layernorm",
        "weight_offset": call.number("weight_offset", weight_offset),
        "x_scale": call.number("x_scale", x_scale),
    }
    results = _NORM(tuple(options.items()), x, weight, bias, residual)
    return results[0] if residual is None else tuple(results)
