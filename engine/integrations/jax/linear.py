"""Linear layers on JAX's arrays: fused bias, activation and residual; fp8 and int8 weights."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine import kernels
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._gradients import (
    accumulation_dtype,
    differentiable,
    formulas_gradient,
    product,
)
from engine.integrations.jax._operators import Shapes, Struct, define
from engine.kernels._contract import FLOAT32, FLOATS
from engine.kernels.gemm.operands import check_columns, out_dtype_of

__all__ = ["linear", "linear_fp8", "linear_int8"]


def _columns(weight: Any, activation: str | None) -> int:
    return int(weight.shape[0]) // (2 if activation in ("swiglu", "silu_and_mul") else 1)


def _results(x: Any, weight: Any, *_: Any, activation: Any, out_dtype: str, **__: Any) -> Shapes:
    return [Struct((*x.shape[:-1], _columns(weight, activation)), out_dtype)]


def _multiply(x: Any, weight: Any, bias: Any, residual: Any, **options: Any) -> Any:
    rest = {"bias": bias, "residual": _rows(residual), **_with_dtype(options)}
    return kernels.gemm(_rows(x), weight, **rest)


def _quantized(multiply: Any) -> Any:
    def run(x: Any, weight: Any, scales: Any, bias: Any, residual: Any, **options: Any) -> Any:
        rest = {"bias": bias, "residual": _rows(residual), **_with_dtype(options)}
        return multiply(_rows(x), weight, scales, **rest)

    return run


def _rows(array: Any) -> Any:
    if array is None:
        return None
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _with_dtype(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"out_dtype": jnp.dtype(options["out_dtype"])}


def _formula(
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    *,
    activation: str | None,
    out_dtype: str,
    deterministic: bool,
) -> Any:
    dtype = accumulation_dtype(x)
    y = product(x, weight.T, dtype)
    if bias is not None:
        y += bias.astype(dtype)
    y = _ACTIVATIONS[activation](y)
    if residual is not None:
        y += residual.astype(dtype)
    return [y.astype(out_dtype)]


def _swiglu(y: Any) -> Any:
    gate, up = jnp.split(y, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _silu_and_mul(y: Any) -> Any:
    blocks = y.reshape(*y.shape[:-1], y.shape[-1] // 16, 2, 8)
    product = jax.nn.silu(blocks[..., 0, :]) * blocks[..., 1, :]
    return product.reshape(*y.shape[:-1], y.shape[-1] // 2)


_ACTIVATIONS: dict[str | None, Any] = {
    None: lambda y: y,
    "silu": jax.nn.silu,
    "gelu": lambda y: jax.nn.gelu(y, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "swiglu": _swiglu,
    "silu_and_mul": _silu_and_mul,
}


def _kept(arrays: Any, _: Any) -> Any:
    """Keep no residual, only whether there is one: its gradient is the result's."""
    *factors, residual = arrays
    return factors, None if residual is None else jnp.empty(0, residual.dtype)


def _gradient(options: Any, kept: Any, cotangents: Any) -> Any:
    factors, marker = kept
    gradients = formulas_gradient(_formula, dict(options), (*factors, None), cotangents)
    return (*gradients[:3], None if marker is None else cotangents[0])


_LINEAR = differentiable(
    define("linear", _multiply, _results, rows=(0, 3)), _formula, _gradient, _kept
)
_FP8 = define("linear_fp8", _quantized(kernels.gemm_fp8), _results, rows=(0, 4))
_INT8 = define("linear_int8", _quantized(kernels.gemm_int8), _results, rows=(0, 4))


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    residual: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
) -> jax.Array:
    """Multiply rows by a weight matrix: activation(x Wᵀ + bias) + residual.

    XLA computes the gradient: two GEMMs.

    Parameters
    ----------
    x : (..., K) array of float32, float16 or bfloat16
    weight : (N, K) array of x's dtype
        (out features, in features), as in PyTorch's checkpoints.
    bias : (N,) array of x's dtype, optional
    residual : (..., N) array of the result's dtype, optional
        Added last.
    activation : None, "silu", "gelu" (erf), "gelu_tanh", "relu", "swiglu" or "silu_and_mul"
        The last two multiply silu(gate) by up, and the result has N / 2 columns. See
        `engine.kernels.gemm`.
    out_dtype : dtype, optional
        x's dtype (the default) or float32.
    deterministic : bool
        Sum each row in an order that does not depend on the other rows. Slower for few rows.

    Returns
    -------
    (..., N) or (..., N / 2) array of `out_dtype`

    Examples
    --------
    >>> weight = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    >>> linear(jnp.array([[1.0, 2.0]]), weight, jnp.ones(3), activation="relu")
    Array([[2., 3., 0.]], dtype=float32)
    """
    call = TraceContract("linear")
    x = call.array("x", x, "* K", FLOATS)
    weight = call.array("weight", weight, "N K", x.dtype)
    bias, residual, options = _checked_rest(
        call, x, bias, residual, activation, out_dtype, deterministic
    )
    result: jax.Array = _LINEAR(tuple(options.items()), x, weight, bias, residual)[0]
    return result


def linear_fp8(
    x: Any,
    weight: Any,
    weight_scales: Any,
    bias: Any = None,
    *,
    residual: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
) -> jax.Array:
    """Multiply rows, quantized to e4m3 on the fly, by an e4m3 weight. It has no gradient.

    Parameters
    ----------
    x : (..., K) array of float32, float16 or bfloat16
    weight : (N, K) array of float8_e4m3fn, or of uint8 (its bits)
    weight_scales : (N,) or (ceil(N / 128), ceil(K / 128)) array of float32
        One scale per row, or per block of 128 x 128.
    bias, residual, activation, out_dtype, deterministic
        See `linear`.

    Returns
    -------
    (..., N) or (..., N / 2) array of `out_dtype`

    Examples
    --------
    >>> weight = jnp.array([[1.0, 2.0]]).astype(jnp.float8_e4m3fn)
    >>> linear_fp8(jnp.array([[1.0, 2.0]]), weight, jnp.ones(1))
    Array([[5.]], dtype=float32)
    """
    call = TraceContract("linear_fp8")
    codes = (np.dtype(np.uint8), np.dtype(jnp.float8_e4m3fn))
    weight = call.array("weight", weight, "N K", codes)
    weight = jax.lax.bitcast_convert_type(weight, jnp.uint8)
    is_blocked = np.ndim(weight_scales) == 2
    shape = " ".join(str(-(-call[n] // 128)) for n in "NK") if is_blocked else "N"
    scales = call.array("weight_scales", weight_scales, shape, FLOAT32)
    rest = (bias, residual, activation, out_dtype, deterministic)
    return _run_quantized(call, _FP8, x, weight, scales, *rest)


def linear_int8(
    x: Any,
    weight: Any,
    weight_scales: Any,
    bias: Any = None,
    *,
    residual: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
) -> jax.Array:
    """Multiply rows, quantized to int8 on the fly, by an int8 weight. It has no gradient.

    Parameters
    ----------
    x : (..., K) array of float32, float16 or bfloat16
    weight : (N, K) array of int8
    weight_scales : (N,) array of float32
        One scale per row.
    bias, residual, activation, out_dtype, deterministic
        See `linear`.

    Returns
    -------
    (..., N) or (..., N / 2) array of `out_dtype`

    Examples
    --------
    >>> linear_int8(jnp.array([[1.0, -1.0]]), jnp.array([[3, 1]], jnp.int8), jnp.ones(1))
    Array([[2...]], dtype=float32)
    """
    call = TraceContract("linear_int8")
    weight = call.array("weight", weight, "N K", np.dtype(np.int8))
    scales = call.array("weight_scales", weight_scales, "N", FLOAT32)
    rest = (bias, residual, activation, out_dtype, deterministic)
    return _run_quantized(call, _INT8, x, weight, scales, *rest)


def _run_quantized(
    call: TraceContract, operator: Any, x: Any, weight: Any, scales: Any, *rest: Any
) -> jax.Array:
    x = call.array("x", x, "* K", FLOATS)
    bias, residual, options = _checked_rest(call, x, *rest)
    result: jax.Array = operator(x, weight, scales, bias, residual, **options)[0]
    return result


def _checked_rest(
    call: TraceContract,
    x: Any,
    bias: Any,
    residual: Any,
    activation: str | None,
    out_dtype: Any,
    deterministic: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    dtype = out_dtype_of(call, x.dtype, out_dtype)
    columns = check_columns(call, activation)
    is_own = activation != "swiglu" or dtype == x.dtype
    call.check("out_dtype", is_own, f'{x.dtype} with "swiglu"', str(dtype))
    if bias is not None:
        bias = call.array("bias", bias, "N", x.dtype)
    if residual is not None:
        call.check("residual", activation != "swiglu", 'None with "swiglu"', "an array")
        shape = " ".join(map(str, (*x.shape[:-1], columns)))
        residual = call.array("residual", residual, shape, dtype)
    options = {"activation": activation, "out_dtype": dtype.name, "deterministic": deterministic}
    return bias, residual, options
