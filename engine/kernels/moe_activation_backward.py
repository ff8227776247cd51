"""Gradients of an expert's activation and of the routing weights.

`cuda_src/moe_activation_backward.cu`, mirror `reference/moe_activation_backward.py`.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOAT32, FLOAT64, MIRROR_FLOATS, Contract
from engine.kernels._elementwise import is_aligned, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.moe_gemm.operands import ACTIVATIONS
from engine.kernels.moe_route import checked_order, checked_routing
from engine.reference import Routing

__all__ = ["moe_activation_backward", "specs"]

_ACTIVATIONS = ("swiglu", "swiglu_clamped")
_THREADS = 128  # kThreads in CUDA
_WARPS = _THREADS // 32
_PARAMS = (
    "dy:ptr h:ptr order:ptr weights:ptr dh:ptr scaled:ptr dweights:ptr num_pairs:i32 "
    "num_features:i32 activation:i32 alpha:f32 limit:f32"
)
_VECTOR = Kernel("moe_activation_backward_vector", _PARAMS)
_SCALAR = Kernel("moe_activation_backward_scalar", _PARAMS)


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("moe_activation_backward.cu", dtype),)


def moe_activation_backward(
    dy: Any,
    h: Any,
    routing: Routing,
    *,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> tuple[Any, Any, Any]:
    """Differentiate w · act(h), the weighted rows between the two products of a mixture of experts.

    Parameters
    ----------
    dy : (P, F) array of h's dtype
        Gradient with respect to w · act(h): the gradient of the layer's result, gathered and
        multiplied by the second matrices (`moe_gemm` with `transposed`).
    h : (P, 2F) array of float32, float16 or bfloat16
        Rows [gate | up] sorted by expert: the first product, before its activation.
    routing : Routing
        Result of `moe_route`, with P = T·k pairs; w is the routing weight of a row's pair.
    activation, alpha, limit
        "swiglu" or "swiglu_clamped". See `moe_gemm`.

    Returns
    -------
    dh : (P, 2F) array of h's dtype
    scaled : (P, F) array of h's dtype
        w · act(h): `moe_wgrad` of the gradient of the layer's result and this is the gradient of
        the second matrices.
    dweights : (T, k) array of float32
        Gradient with respect to the routing weights.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    The second product is linear: w · (W a) = W (w · a). So the gradient with respect to w is the
    dot product of a with Wᵀ times the gradient of the result, and the experts' results need not
    be kept. Computed in float32; each result is rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.kernels import moe_route
    >>> routing = moe_route(np.zeros((1, 2), np.float32), 2)  # both experts, a half each
    >>> h = np.array([[0.0, 3.0], [100.0, 3.0]], np.float32)
    >>> dh, scaled, dweights = moe_activation_backward(np.ones((2, 1), np.float32), h, routing)
    >>> dh.tolist(), scaled.tolist(), dweights.tolist()
    ([[0.75, 0.0], [1.5, 50.0]], [[0.0], [150.0]], [[0.0, 300.0]])
    """
    call = Contract("moe_activation_backward")
    dy = call.array("dy", dy, "P F", MIRROR_FLOATS)
    h = call.array("h", h, f"P {2 * call['F']}", dy.dtype)
    routing = checked_routing(call, routing)
    weights = call.array("routing.weights", routing.weights, "T k", (FLOAT32, FLOAT64))
    call.check("routing.weights", weights.size == call["P"], f"of {call['P']} pairs", weights.shape)
    order = checked_order(call, routing.order)
    call.check("activation", activation in _ACTIVATIONS, f"one of {_ACTIVATIONS}", activation)
    call.number("alpha", alpha)
    call.number("limit", limit, low=0.0)
    routing = Routing(routing.experts, weights, order, routing.offsets)
    if call.on_cpu:
        return reference.moe_activation_backward(
            dy, h, routing, activation=activation, alpha=alpha, limit=limit
        )
    dh = call.output("dh", None, h.shape, h.dtype)
    scaled = call.output("scaled", None, dy.shape, dy.dtype)
    dweights = call.output("dweights", None, weights.shape, FLOAT32)
    fits = call["F"] % vector_width(dy) == 0 and is_aligned(dy, h, dh, scaled)
    (_VECTOR if fits else _SCALAR).launch(
        specs(dtype_name(dy.dtype))[0],
        (ceil_div(call["P"], _WARPS),),
        (_THREADS,),
        pdl=True,
        dy=dy,
        h=h,
        order=order,
        weights=weights,
        dh=dh,
        scaled=scaled,
        dweights=dweights,
        num_pairs=call["P"],
        num_features=call["F"],
        activation=ACTIVATIONS.index(activation),
        alpha=alpha,
        limit=limit,
    )
    return dh, scaled, dweights
