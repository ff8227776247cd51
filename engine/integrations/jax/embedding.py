"""Token embeddings on JAX's arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from engine import kernels
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._gradients import accumulation_dtype, differentiable
from engine.integrations.jax._operators import Shapes, Struct, define
from engine.kernels._contract import MIRROR_FLOATS

__all__ = ["embedding"]


def _rows(token_ids: Any, weight: Any, **_: Any) -> Shapes:
    return [Struct((*token_ids.shape, weight.shape[1]), weight.dtype)]


def _look_up(token_ids: Any, weight: Any, *, scale: float) -> Any:
    return kernels.embedding(token_ids.reshape(-1), weight, scale=scale)


def _formula(token_ids: Any, weight: Any, *, scale: float) -> Any:
    rows = jnp.take(weight, jnp.where(token_ids < 0, len(weight), token_ids), axis=0, mode="fill")
    return [(rows.astype(accumulation_dtype(weight)) * scale).astype(weight.dtype)]


_EMBEDDING = differentiable(define("embedding", _look_up, _rows, rows=(0,)), _formula)


def embedding(token_ids: Any, weight: Any, *, scale: float = 1.0) -> jax.Array:
    """Look up each token's row of the table.

    Parameters
    ----------
    token_ids : (...) array of integers
        An id outside [0, V) yields a row of NaN; -2**31 (padding) yields a row of zeros. The
        gradient of such a row is dropped.
    weight : (V, N) array of float32, float16 or bfloat16; on CPUs also float64
    scale : float
        Factor, applied in float32 (Gemma: sqrt(N), rounded to its dtype by the caller).

    Returns
    -------
    out : (..., N) array of weight's dtype

    Examples
    --------
    >>> embedding(jnp.array([1, -(2**31)]), jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    Array([[3., 4.],
           [0., 0.]], dtype=float32)
    """
    call = TraceContract("embedding")
    token_ids = call.integers("token_ids", token_ids, "*")
    weight = call.array("weight", weight, "V N", MIRROR_FLOATS)
    call.check("weight", weight.shape[0] > 0, "of at least one row", weight.shape)
    result: jax.Array = _EMBEDDING((("scale", call.number("scale", scale)),), token_ids, weight)[0]
    return result
