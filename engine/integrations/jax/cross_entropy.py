"""Cross-entropy of logits on JAX's arrays, with its gradient."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from engine import kernels
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._gradients import accumulation_dtype
from engine.integrations.jax._operators import Shapes, Struct, define, like, varying_alike
from engine.kernels._contract import MIRROR_FLOATS

__all__ = ["averaged", "checked_options", "cross_entropy"]

_REDUCTIONS = ("mean", "sum", "none")


def _losses(logits: Any, target: Any, **options: Any) -> Any:
    return kernels.cross_entropy(logits, target, **options)[0]


def _loss_gradient(dloss: Any, logits: Any, target: Any, **options: Any) -> Any:
    return kernels.cross_entropy(logits, target, dloss=dloss, **options)[2]


def _rows(logits: Any, *_: Any, **__: Any) -> Shapes:
    return [Struct(logits.shape[:1], accumulation_dtype(logits))]


_LOSSES = define("cross_entropy", _losses, _rows, rows=(0, 1), merges=True)
_BACKWARD = define(
    "cross_entropy_backward",
    _loss_gradient,
    lambda _, logits, *__, **___: [like(logits)],
    rows=(0, 1, 2),
    merges=True,
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: Any, logits: Any, target: Any) -> Any:
    return _LOSSES(logits, target, **dict(options))[0]


def _residuals(options: Any, logits: Any, target: Any) -> Any:
    return _run(options, logits, target), (logits, target)


def _gradient(options: Any, arrays: Any, dloss: Any) -> Any:
    return _BACKWARD(dloss, *arrays, **dict(options))[0], None


_run.defvjp(_residuals, _gradient)


def cross_entropy(
    logits: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float = 0.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Return the cross-entropy of logits along their last axis.

    Parameters
    ----------
    logits : (..., V) array of float32, float16 or bfloat16; on CPUs also float64
    target : (...) array of integers
        Class of each row. One outside [0, V) yields NaN.
    ignore_index : int
        Rows with this target have loss and gradient 0, and do not count in the mean.
    reduction : {"mean", "sum", "none"}
    softcap, z_loss, label_smoothing : float
        See `engine.kernels.cross_entropy`.

    Returns
    -------
    loss : () array, or (...) with "none", of float32 (float64 for float64)
        The mean over no targets is NaN.

    Examples
    --------
    >>> cross_entropy(jnp.array([[0.0, 0.0], [9.0, 9.0]]), jnp.array([1, -100]))
    Array(0.693..., dtype=float32)
    """
    call = TraceContract("cross_entropy")
    logits = call.array("logits", logits, "* V", MIRROR_FLOATS)
    call.check("logits", logits.shape[-1] > 0, "of at least one class", logits.shape)
    shape = logits.shape[:-1]
    target = call.integers("target", target, " ".join(map(str, shape)))
    options = checked_options(call, reduction, ignore_index, softcap, z_loss, label_smoothing)
    count = math.prod(shape)
    rows = (logits.reshape(count, logits.shape[-1]), target.reshape(count))
    losses: jax.Array = _run(options, *varying_alike(rows))
    if reduction == "none":
        return losses.reshape(shape)
    return averaged(losses.sum(), target, ignore_index, reduction)


def checked_options(
    call: TraceContract,
    reduction: str,
    ignore_index: int,
    softcap: float,
    z_loss: float,
    label_smoothing: float,
) -> tuple[tuple[str, Any], ...]:
    """Check the arguments and return the options of `kernels.cross_entropy`."""
    call.check("reduction", reduction in _REDUCTIONS, f"one of {_REDUCTIONS}", reduction)
    ignored = call.integer("ignore_index", ignore_index, -(2**31), 2**31 - 1, "an int32")
    return (
        ("ignore_index", ignored),
        ("softcap", call.number("softcap", softcap, low=0.0)),
        ("z_loss", call.number("z_loss", z_loss, low=0.0)),
        ("label_smoothing", call.number("label_smoothing", label_smoothing, low=0.0, high=1.0)),
    )


def averaged(total: Any, target: Any, ignore_index: int, reduction: str) -> jax.Array:
    """Return the sum of the losses, or their mean over the targets that are not ignored."""
    result: jax.Array = total
    if reduction == "sum":
        return result
    return result / jnp.sum(target != ignore_index, dtype=result.dtype)
