"""The output layer and its loss on JAX's arrays: the logits never exist as a whole.

A chunk of rows at a time, XLA computes logits and `kernels.cross_entropy` turns them, in place,
into losses and the logits' gradient, from which XLA computes the gradients of x and of the weight.
The method is Liger's (Hsu et al., arXiv:2410.10989).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from engine import kernels
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._gradients import accumulation_dtype, product
from engine.integrations.jax._operators import Shapes, Struct, define, like, varying_alike
from engine.integrations.jax.cross_entropy import averaged, checked_options
from engine.kernels._contract import MIRROR_FLOATS

__all__ = ["linear_cross_entropy"]

_ROWS_MULTIPLE = 256  # whole tiles of the products


def _losses(logits: Any, target: Any, dloss: Any, **options: Any) -> Any:
    """Return the losses; with `dloss`, turn the logits into their gradient."""
    out = None if dloss is None else logits
    return kernels.cross_entropy(logits, target, dloss=dloss, dlogits_out=out, **options)[0]


def _loss_rows(logits: Any, *_: Any, **__: Any) -> Shapes:
    return [Struct(logits.shape[:1], accumulation_dtype(logits))]


def _loss_rows_and_gradient(logits: Any, *_: Any, **__: Any) -> Shapes:
    return [*_loss_rows(logits), like(logits)]


_LOSSES = define("linear_cross_entropy", _losses, _loss_rows, rows=(0, 1), merges=True)
_LOSSES_AND_GRADIENT = define(
    "linear_cross_entropy_gradient",
    _losses,
    _loss_rows_and_gradient,
    rows=(0, 1, 2),
    merges=True,
    aliases={0: 1},
)


def _chunk_rows(num_rows: int, vocab: int, hidden: int) -> int:
    """Return the rows per chunk: its logits take as much memory as x, or an eighth of the weight.

    Examples
    --------
    >>> _chunk_rows(16384, 128256, 4096)
    512
    """
    rows = max(num_rows // -(-vocab // max(hidden, 1)), hidden // 8, 1)
    return min(-(-rows // _ROWS_MULTIPLE) * _ROWS_MULTIPLE, num_rows)


def _chunked(options: Any, weight: Any, x: Any, target: Any, dloss: Any) -> tuple[Any, ...]:
    """Return the arrays in chunks of rows; padded rows are ignored."""
    num_rows, hidden = x.shape
    step = max(_chunk_rows(num_rows, weight.shape[0], hidden), 1)
    padding = -num_rows % step

    def chunks(array: Any, fill: int = 0) -> Any:
        if padding:
            widths = [(0, padding)] + [(0, 0)] * (array.ndim - 1)
            array = jnp.pad(array, widths, constant_values=fill)
        return array.reshape(-1, step, *array.shape[1:])

    ignored = dict(options)["ignore_index"]
    return chunks(x), chunks(target, ignored), None if dloss is None else chunks(dloss)


def _logits(x: Any, weight: Any, bias: Any) -> Any:
    logits = product(x, weight.T, accumulation_dtype(x))
    return (logits if bias is None else logits + bias.astype(logits.dtype)).astype(x.dtype)


def _all_losses(options: Any, x: Any, weight: Any, bias: Any, target: Any) -> Any:
    def one(chunk: Any) -> Any:
        return _LOSSES(_logits(chunk[0], weight, bias), chunk[1], None, **dict(options))[0]

    chunks = _chunked(options, weight, x, target, None)[:2]
    return jax.lax.map(one, chunks).reshape(-1)[: x.shape[0]]


def _all_gradients(
    options: Any, x: Any, weight: Any, bias: Any, target: Any, dloss: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Return the loss of each row, and the gradients of x, weight and bias for `dloss`."""
    real = accumulation_dtype(x)

    def one(totals: Any, chunk: Any) -> Any:
        rows, ids, factors = chunk
        logits = _logits(rows, weight, bias)
        losses, dlogits = _LOSSES_AND_GRADIENT(logits, ids, factors, **dict(options))
        dweight = totals[0] + product(dlogits.T, rows, real)
        dbias = None if bias is None else totals[1] + dlogits.sum(0, dtype=real)
        return (dweight, dbias), (losses, product(dlogits, weight, real).astype(x.dtype))

    zeros = [None if a is None else jnp.zeros_like(a, dtype=real) for a in (weight, bias)]
    start = tuple(varying_alike([*zeros, x])[:2])
    chunks = _chunked(options, weight, x, target, dloss)
    (dweight, dbias), (losses, dx) = jax.lax.scan(one, start, chunks)
    num_rows = x.shape[0]
    dx = dx.reshape(-1, x.shape[1])[:num_rows]
    dbias = None if bias is None else dbias.astype(bias.dtype)
    return losses.reshape(-1)[:num_rows], (dx, dweight.astype(weight.dtype), dbias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(options: Any, x: Any, weight: Any, bias: Any, target: Any) -> Any:
    return _all_losses(options, x, weight, bias, target).sum()


def _sum_residuals(options: Any, x: Any, weight: Any, bias: Any, target: Any) -> Any:
    """Compute the gradients at once: they are proportional to the cotangent."""
    ones = jnp.ones(x.shape[0], accumulation_dtype(x))
    ones = varying_alike([ones, x])[0]
    losses, gradients = _all_gradients(options, x, weight, bias, target, ones)
    return losses.sum(), gradients


def _sum_gradient(options: Any, gradients: Any, dloss: Any) -> Any:
    scaled = (
        None if g is None else (g.astype(dloss.dtype) * dloss).astype(g.dtype) for g in gradients
    )
    return (*scaled, None)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(options: Any, x: Any, weight: Any, bias: Any, target: Any) -> Any:
    return _all_losses(options, x, weight, bias, target)


def _each_residuals(options: Any, *arrays: Any) -> Any:
    return _each(options, *arrays), arrays


def _each_gradient(options: Any, arrays: Any, dloss: Any) -> Any:
    x, weight, bias, target = arrays
    return (*_all_gradients(options, x, weight, bias, target, dloss)[1], None)


_sum.defvjp(_sum_residuals, _sum_gradient)
_each.defvjp(_each_residuals, _each_gradient)


def linear_cross_entropy(
    x: Any,
    weight: Any,
    target: Any,
    *,
    bias: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float = 0.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Return ``cross_entropy(linear(x, weight, bias), target)`` without the logits in memory.

    Parameters
    ----------
    x : (..., K) array of float32, float16 or bfloat16; on CPUs also float64
    weight : (V, K) array of x's dtype
    target : (...) array of integers
        Class of each row. One outside [0, V) yields NaN.
    bias : (V,) array of x's dtype, optional
    ignore_index, reduction, softcap, z_loss, label_smoothing
        See `cross_entropy`.

    Returns
    -------
    loss : () array, or (...) with "none", of float32 (float64 for float64)

    Notes
    -----
    The logits are rounded to x's dtype, as a linear layer's are; the gradients of weight and bias
    are summed in float32. With "mean" and "sum" the gradients are computed in the forward pass: 3
    products. With "none" they depend on each row's factor, so the backward pass computes the logits
    again: 4 products.

    Examples
    --------
    >>> x, weight = jnp.eye(2), jnp.array([[9.0, 0.0], [0.0, 0.0]])
    >>> linear_cross_entropy(x, weight, jnp.array([1, 1]), reduction="none")
    Array([9.000..., 0.693...], dtype=float32)
    """
    call = TraceContract("linear_cross_entropy")
    x = call.array("x", x, "* K", MIRROR_FLOATS)
    shape = x.shape[:-1]
    weight = call.array("weight", weight, "V K", x.dtype)
    call.check("weight", weight.size > 0, "of at least one element", weight.shape)
    bias = None if bias is None else call.array("bias", bias, "V", x.dtype)
    target = call.integers("target", target, " ".join(map(str, shape)))
    options = checked_options(call, reduction, ignore_index, softcap, z_loss, label_smoothing)
    count = math.prod(shape)
    arrays = (x.reshape(count, x.shape[-1]), weight, bias, target.reshape(count))
    if reduction == "none":
        losses: jax.Array = _each(options, *varying_alike(arrays))
        return losses.reshape(shape)
    return averaged(_sum(options, *varying_alike(arrays)), target, ignore_index, reduction)
