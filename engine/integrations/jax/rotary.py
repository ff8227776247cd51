"""Rotary position embeddings on JAX's arrays."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from engine import kernels
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._operators import Shapes, define, like, varying_alike
from engine.kernels._contract import FLOAT32, MIRROR_FLOATS

__all__ = ["rope"]


def _rotated(q: Any, k: Any, *_: Any, **__: Any) -> Shapes:
    return [like(a) for a in (q, k)]


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
