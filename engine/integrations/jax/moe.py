"""Mixtures of experts on JAX's arrays: the router's choice, and the experts' products.

The number of rows per expert stays on the device: shapes do not depend on it, so the program is
compiled once. The backward pass is that of `engine.integrations.torch.moe`: the forward pass keeps
h, the first product before its activation, and the order of the pairs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from engine import kernels
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._gradients import accumulation_dtype
from engine.integrations.jax._operators import Shapes, Struct, define, like, varying_alike
from engine.kernels import Routing
from engine.kernels._contract import INT32, MIRROR_FLOATS
from engine.kernels.moe_route import checked_groups

__all__ = ["moe_experts", "moe_route"]


# ---- router ----------------------------------------------------------------------------------


def _choose(logits: Any, correction: Any, **options: Any) -> Any:
    top_k = options.pop("top_k")
    routing = kernels.moe_route(logits, top_k, correction=correction, **options)
    return routing.weights, routing.experts


def _choices(logits: Any, correction: Any, *, top_k: int, **_: Any) -> Shapes:
    shape = (logits.shape[0], top_k)
    return [Struct(shape, logits.dtype), Struct(shape, INT32)]


_ROUTE = define("moe_route", _choose, _choices, rows=(0,), merges=True)
_ROUTE_BACKWARD = define(
    "moe_route_backward",
    kernels.moe_route_backward,
    lambda dweights, logits, *_, **__: [like(logits)],
    rows=(0, 1, 2),
    merges=True,
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _route(options: Any, logits: Any, correction: Any) -> Any:
    return _ROUTE(logits, correction, **dict(options))


def _route_residuals(options: Any, logits: Any, correction: Any) -> Any:
    weights, ids = _route(options, logits, correction)
    return (weights, ids), (logits, ids)


def _route_gradient(options: Any, kept: Any, cotangents: Any) -> Any:
    chosen = dict(options)
    rule = {name: chosen[name] for name in ("score", "renormalize", "scale")}
    return _ROUTE_BACKWARD(cotangents[0], *kept, **rule)[0], None


_route.defvjp(_route_residuals, _route_gradient)


def moe_route(
    logits: Any,
    top_k: int,
    *,
    score: str = "softmax",
    correction: Any = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Choose the `top_k` experts of each token, and their weights.

    Parameters
    ----------
    logits : (T, E) array
        The router's output, for at most 512 experts; computed in float32.
    top_k : int
        Experts per token (k), at most 16.
    score, correction, num_groups, top_groups, renormalize, scale
        See `engine.kernels.moe_route`. `correction` and groups only choose the experts: they have
        no gradient.

    Returns
    -------
    weights : (T, k) array of float32
        Best first; differentiable with respect to the logits.
    ids : (T, k) array of int32

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> weights, ids = moe_route(jnp.array([[0.0, 9.0, 9.0]]), 2)
    >>> weights, ids
    (Array([[0.5, 0.5]], dtype=float32), Array([[1, 2]], dtype=int32))
    """
    call = TraceContract("moe_route")
    logits = call.array("logits", logits, "T E", MIRROR_FLOATS)
    logits = logits.astype(accumulation_dtype(logits))
    num_experts = call["E"]
    wanted = f"from 1 to 16 and at most E = {num_experts}"
    top_k = call.integer("top_k", top_k, 1, min(16, num_experts), wanted)
    call.check("score", score in ("softmax", "sigmoid"), "'softmax' or 'sigmoid'", score)
    if correction is not None:
        correction = call.array("correction", correction, "E", MIRROR_FLOATS).astype(logits.dtype)
    has_correction = correction is not None
    num_groups, top_groups = checked_groups(
        call, num_experts, top_k, num_groups, top_groups, has_correction=has_correction
    )
    options = {
        "top_k": top_k,
        "score": score,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "renormalize": bool(renormalize),
        "scale": call.number("scale", scale),
    }
    weights, ids = _route(tuple(options.items()), *varying_alike((logits, correction)))
    return weights, ids


# ---- experts ---------------------------------------------------------------------------------


def _experts(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> Any:
    """Compute the layer with the activation fused into the first product."""
    routing = kernels.moe_sort(ids, weights, num_experts=gate_up.shape[0])
    rows = kernels.moe_gemm(x, gate_up, routing, activation="swiglu")
    return kernels.moe_gemm_combine(rows, down, routing, pdl=True)


def _kept_experts(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> Any:
    """Compute the layer, and what its backward pass needs: h and the routing."""
    routing = kernels.moe_sort(ids, weights, num_experts=gate_up.shape[0])
    h = kernels.moe_gemm(x, gate_up, routing)
    out = kernels.moe_gemm_combine(kernels.swiglu(h), down, routing, pdl=True)
    return out, h, routing.experts, routing.order, routing.offsets


def _kept_results(x: Any, gate_up: Any, down: Any, ids: Any, *_: Any) -> Shapes:
    pairs = ids.shape[0] * ids.shape[1]
    return [
        like(x),
        Struct((pairs, gate_up.shape[1]), x.dtype),
        Struct(ids.shape, INT32),
        Struct((pairs,), INT32),
        Struct((gate_up.shape[0] + 1,), INT32),
    ]


def _hidden_backward(
    dout: Any, h: Any, down: Any, weights: Any, ids: Any, order: Any, offsets: Any
) -> Any:
    routing = Routing(ids, weights, order, offsets)
    dy = kernels.moe_gemm(dout, down, routing, transposed=True)
    return kernels.moe_activation_backward(dy, h, routing)


def _hidden_results(dout: Any, h: Any, down: Any, weights: Any, *_: Any) -> Shapes:
    scaled = Struct((h.shape[0], down.shape[2]), h.dtype)
    return [like(h), scaled, like(weights)]


def _dgrad(dh: Any, gate_up: Any, weights: Any, ids: Any, order: Any, offsets: Any) -> Any:
    routing = Routing(ids, weights, order, offsets)
    pairs = kernels.moe_gemm(dh, gate_up, routing, scatter=True, weighted=False, transposed=True)
    return kernels.moe_combine(pairs.reshape(*ids.shape, gate_up.shape[2]))


def _dgrad_results(dh: Any, gate_up: Any, weights: Any, ids: Any, *_: Any) -> Shapes:
    return [Struct((ids.shape[0], gate_up.shape[2]), dh.dtype)]


def _wgrad(dy: Any, x: Any, ids: Any, order: Any, offsets: Any, *, gather: str) -> Any:
    return kernels.moe_wgrad(dy, x, Routing(ids, None, order, offsets), gather=gather)


def _wgrad_results(dy: Any, x: Any, ids: Any, order: Any, offsets: Any, **_: Any) -> Shapes:
    return [Struct((offsets.shape[0] - 1, dy.shape[1], x.shape[1]), x.dtype)]


_EXPERTS = define(
    "moe_experts",
    _experts,
    lambda x, *_: [like(x)],
    rows=(0, 3, 4),
    merges=True,
)
_KEPT_EXPERTS = define("moe_experts_kept", _kept_experts, _kept_results)
_HIDDEN_BACKWARD = define("moe_hidden_backward", _hidden_backward, _hidden_results)
_DGRAD = define("moe_dgrad", _dgrad, _dgrad_results)
_WGRAD = define("moe_wgrad", _wgrad, _wgrad_results)


def _forward(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> Any:
    return _EXPERTS(x, gate_up, down, ids, weights)[0]


def _residuals(*arrays: Any) -> Any:
    out, *kept = _KEPT_EXPERTS(*arrays)
    return out, (arrays, kept)


def _gradient(residuals: Any, dout: Any) -> Any:
    """Return the gradients of x, gate_up, down, ids (None) and weights."""
    (x, gate_up, down, _, weights), (h, *routing) = residuals
    dh, scaled, dweights = _HIDDEN_BACKWARD(dout, h, down, weights, *routing)
    (dx,) = _DGRAD(dh, gate_up, weights, *routing)
    (dgate_up,) = _WGRAD(dh, x, *routing, gather="x")
    (ddown,) = _WGRAD(dout, scaled, *routing, gather="dy")
    return dx, dgate_up, ddown, None, dweights


_run = jax.custom_vjp(_forward)
_run.defvjp(_residuals, _gradient)


def moe_experts(
    x: Any,
    gate_up: Any,
    down: Any,
    topk_ids: Any,
    topk_weights: Any,
    *,
    activation: str = "swiglu",
) -> jax.Array:
    """Return the weighted sum of each token's experts.

    Parameters
    ----------
    x : (T, N) array of float32, float16 or bfloat16; on CPUs also float64
    gate_up : (E, 2F, N) array of x's dtype
        For each expert the F rows of gate, then those of up.
    down : (E, N, F) array of x's dtype
    topk_ids : (T, k) array of integers
        Experts of each token. An id outside [0, E) is taken for the nearest expert.
    topk_weights : (T, k) array
        Factors on the experts' outputs; cast to float32.
    activation : "swiglu"

    Returns
    -------
    (T, N) array of x's dtype

    Notes
    -----
    Differentiable with respect to all floating-point arguments, once. Gradients are summed in a
    fixed order, so they have the same bits every time.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, 2.0]])
    >>> gate_up = jnp.array([[[100.0, 0.0], [0.0, 1.0]]])  # gate selects column 0, up column 1
    >>> down = jnp.array([[[1.0], [0.0]]])
    >>> moe_experts(x, gate_up, down, jnp.array([[0]]), jnp.array([[0.5]]))
    Array([[100.,   0.]], dtype=float32)
    """
    call = TraceContract("moe_experts")
    call.check("activation", activation == "swiglu", "'swiglu'", activation)
    x = call.array("x", x, "T N", MIRROR_FLOATS)
    down = call.array("down", down, "E N F", x.dtype)
    gate_up = call.array("gate_up", gate_up, f"E {2 * call['F']} N", x.dtype)
    ids = call.integers("topk_ids", topk_ids, "T k")
    weights = call.array("topk_weights", topk_weights, "T k", MIRROR_FLOATS)
    arrays = (x, gate_up, down, ids, weights.astype(accumulation_dtype(x)))
    result: jax.Array = _run(*varying_alike(arrays))
    return result
