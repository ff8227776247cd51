"""Activations on JAX's arrays: gated ones on packed rows [gate | up], and their plain forms."""

from __future__ import annotations

from functools import partial
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
from engine.integrations.jax._operators import Shapes, Struct, define, like
from engine.kernels._contract import MIRROR_FLOATS

__all__ = ["geglu", "gelu", "relu", "silu", "swiglu"]

_APPROXIMATIONS = ("tanh", "none")


def _half(x: Any, **_: Any) -> Shapes:
    return [Struct((*x.shape[:-1], x.shape[-1] // 2), x.dtype)]


def _whole(x: Any, **_: Any) -> Shapes:
    return [like(x)]


def _gelu_formula(x: Any, approximate: str) -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _plain(activation: Any, x: Any, **options: Any) -> Any:
    return [activation(x.astype(accumulation_dtype(x)), **options).astype(x.dtype)]


def _gated(activation: Any, x: Any, **options: Any) -> Any:
    gate, up = jnp.split(x.astype(accumulation_dtype(x)), 2, axis=-1)
    return [(activation(gate, **options) * up).astype(x.dtype)]


def _gelu_backward(dout: Any, x: Any, *, approximate: str) -> Any:
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    return kernels.activation_backward(dout, x, name)


def _operator(name: str, results: Any, formula: Any, gradient: Any) -> Any:
    """Define an activation and its gradient, which XLA differentiates by the formula."""

    def gradient_formula(dout: Any, x: Any, **options: Any) -> Any:
        return formulas_gradient(formula, options, (x,), (dout,))

    def backward(options: Any, arrays: Any, cotangents: Any) -> Any:
        return run_backward(options, *cotangents, *arrays)

    operator = define(f"{name}_backward", gradient, lambda _, x, **__: _whole(x), rows=(0, 1))
    run_backward = differentiable(operator, gradient_formula)
    forward = define(name, getattr(kernels, name), results, rows=(0,))
    return differentiable(forward, formula, backward)


_SILU = _operator(
    "silu",
    _whole,
    partial(_plain, jax.nn.silu),
    lambda dout, x: kernels.activation_backward(dout, x, "silu"),
)
_RELU = _operator(
    "relu",
    _whole,
    partial(_plain, jax.nn.relu),
    lambda dout, x: kernels.activation_backward(dout, x, "relu"),
)
_GELU = _operator("gelu", _whole, partial(_plain, _gelu_formula), _gelu_backward)
_SWIGLU = _operator("swiglu", _half, partial(_gated, jax.nn.silu), kernels.swiglu_backward)
_GEGLU = _operator("geglu", _half, partial(_gated, _gelu_formula), kernels.geglu_backward)


def swiglu(x: Any) -> jax.Array:
    """Multiply the upper half of each row by the SiLU of the lower half.

    Parameters
    ----------
    x : (..., 2F) array of float32, float16 or bfloat16
        Rows [gate | up]. On CPUs also float64.

    Returns
    -------
    out : (..., F) array of x's dtype

    Examples
    --------
    >>> swiglu(jnp.array([[0.0, 100.0, 5.0, 2.0]]))
    Array([[  0., 200.]], dtype=float32)
    """
    return _first(_SWIGLU((), _packed("swiglu", x)))


def geglu(x: Any, *, approximate: str = "tanh") -> jax.Array:
    """Multiply the upper half of each row by the GELU of the lower half.

    Parameters
    ----------
    x : (..., 2F) array
        See `swiglu`.
    approximate : {"tanh", "none"}
        "none" is the exact GELU, based on erf.

    Returns
    -------
    out : (..., F) array of x's dtype

    Examples
    --------
    >>> geglu(jnp.array([[0.0, 100.0, 5.0, 2.0]]))
    Array([[  0., 200.]], dtype=float32)
    """
    x = _packed("geglu", x)
    return _first(_GEGLU(_approximation("geglu", approximate), x))


def gelu(x: Any, *, approximate: str = "none") -> jax.Array:
    """Apply the Gaussian error linear unit to every element.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16; on CPUs also float64
    approximate : {"none", "tanh"}
        "none" is the exact function, based on erf (the default of `jax.nn.gelu` is "tanh").

    Examples
    --------
    >>> gelu(jnp.array([-1.0, 0.0, 1.0]))
    Array([-0.158...,  0.  ...,  0.841...], dtype=float32)
    """
    x = _checked("gelu", x)
    return _first(_GELU(_approximation("gelu", approximate), x))


def silu(x: Any) -> jax.Array:
    """Multiply every element by its sigmoid.

    Examples
    --------
    >>> silu(jnp.array([-1.0, 0.0, 1.0]))
    Array([-0.268...,  0.  ...,  0.731...], dtype=float32)
    """
    return _first(_SILU((), _checked("silu", x)))


def relu(x: Any) -> jax.Array:
    """Replace negative elements by zero; NaN stays NaN.

    Examples
    --------
    >>> relu(jnp.array([-1.0, 0.5]))
    Array([0. , 0.5], dtype=float32)
    """
    return _first(_RELU((), _checked("relu", x)))


def _checked(name: str, x: Any) -> Any:
    return TraceContract(name).array("x", x, "*", MIRROR_FLOATS)


def _packed(name: str, x: Any) -> Any:
    call = TraceContract(name)
    x = call.array("x", x, "* 2F", MIRROR_FLOATS)
    call.check("x", x.shape[-1] % 2 == 0, "of rows [gate | up], an even number", x.shape)
    return x


def _approximation(name: str, approximate: str) -> Any:
    call = TraceContract(name)
    call.check("approximate", approximate in _APPROXIMATIONS, "'tanh' or 'none'", approximate)
    return (("approximate", approximate),)


def _first(results: Any) -> jax.Array:
    result: jax.Array = results[0]
    return result
