"""Token embeddings and rotary position embeddings on JAX's arrays."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from engine import kernels
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._gradients import accumulation_dtype, differentiable
from engine.integrations.jax._operators import Shapes, define, varying_alike
from engine.kernels._contract import FLOAT32, MIRROR_FLOATS

__all__ = ["embedding", "rope"]


def _rows(token_ids: Any, weight: Any, **_: Any) -> Shapes:
    return [jax.ShapeDtypeStruct((*token_ids.shape, weight.shape[1]), weight.dtype)]


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


def _rotated(q: Any, k: Any, *_: Any, **__: Any) -> Shapes:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k)]


_ROPE = define("rope", kernels.rope, _rotated, rows=(0, 1, 2), merges=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rope(options: Any, q: Any, k: Any, positions: Any, cos_sin: Any) -> Any:
    return _ROPE(q, k, positions, cos_sin, **dict(options))


def _residuals(options: Any, q: Any, k: Any, positions: Any, cos_sin: Any) -> Any:
    return _rope(options, q, k, positions, cos_sin), (positions, cos_sin)


def _gradient(options: Any, constants: Any, cotangents: Any) -> Any:
    """Turn the gradients back: a rotation's transpose is its inverse."""
    turned = dict(options)
    turned["inverse"] = not turned["inverse"]
    return (*_rope(tuple(turned.items()), *cotangents, *constants), None, None)


_rope.defvjp(_residuals, _gradient)


def rope(
    q: Any, k: Any, cos_sin: Any, positions: Any, *, interleaved: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Rotate the feature pairs of each head by the angles of its token's position.

    Parameters
    ----------
    q : (..., H, D) array of float32, float16 or bfloat16; on CPUs also float64
        One token for each element of the leading axes.
    k : (..., K, D) array of q's dtype
        Leading axes as for `q`.
    cos_sin : (P, R) array of float32
        R/2 cosines, then R/2 sines of each position; R is even and at most D. Features from R on
        are not rotated. No gradient.
    positions : (...) array of integers
        Each token's row of `cos_sin`; broadcast to the leading axes of `q`. On GPUs a position
        outside the table makes the rotated features NaN.
    interleaved : bool
        Rotate pairs (2i, 2i+1) instead of (i, i + R/2).

    Returns
    -------
    q', k' : arrays of the shapes and dtype of `q` and `k`

    Examples
    --------
    >>> q = jnp.array([[[1.0, 0.0]]])
    >>> quarter_turn = jnp.array([[0.0, 1.0]])  # cos, sin of position 0
    >>> rope(q, q, quarter_turn, jnp.array([0]))[0]
    Array([[[0., 1.]]], dtype=float32)
    """
    call = TraceContract("rope")
    q = call.array("q", q, "* H D", MIRROR_FLOATS)
    tokens = q.shape[:-2]
    k = call.array("k", k, " ".join([*map(str, tokens), "K", "D"]), q.dtype)
    cos_sin = call.array("cos_sin", cos_sin, "P R", FLOAT32)
    fits = cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= call["D"]
    call.check("cos_sin", fits, f"(P, R), R even and at most D = {call['D']}", cos_sin.shape)
    positions = call.integers("positions", positions, "*")
    sizes = zip(reversed(positions.shape), reversed(tokens), strict=False)
    fits = positions.ndim <= len(tokens) and all(n in (1, wanted) for n, wanted in sizes)
    call.check("positions", fits, f"of a shape that broadcasts to {tokens}", positions.shape)
    count = math.prod(tokens)
    arrays = (
        q.reshape(count, *q.shape[-2:]),
        k.reshape(count, *k.shape[-2:]),
        jnp.broadcast_to(positions, tokens).reshape(count),
        cos_sin,
    )
    options = (("interleaved", bool(interleaved)), ("inverse", False))
    rotated = _rope(options, *varying_alike(arrays))
    return rotated[0].reshape(q.shape), rotated[1].reshape(k.shape)
