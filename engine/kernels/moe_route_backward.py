"""Gradient of the routing weights: `cuda_src/moe_route_backward.cu`.

The mirror is `reference/moe_route_backward.py`.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import FLOAT32, FLOAT64, INT32, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.moe_route import MAX_EXPERTS, MAX_TOP_K, SCORES, WIDTHS

__all__ = ["moe_route_backward", "specs"]

_THREADS = 256  # kThreads in CUDA
_WARPS = _THREADS // 32
_KERNELS = {
    width: Kernel(
        f"moe_route_backward_{width}",
        "dweights:ptr logits:ptr experts:ptr dlogits:ptr num_tokens:i32 num_experts:i32 top_k:i32 "
        "is_sigmoid:i32 renormalize:i32 scale:f32",
        struct="MoeRouteBackwardParams",
    )
    for width in WIDTHS
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the module of the op: one for all dtypes, since logits are float32."""
    return (ModuleSpec("moe_route_backward.cu", "float32"),)


def moe_route_backward(
    dweights: Any,
    logits: Any,
    experts: Any,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    out: Any = None,
) -> Any:
    """Return the gradient of the routing weights of `moe_route` with respect to the logits.

    Parameters
    ----------
    dweights : (T, k) array of float32
        Gradient with respect to the weights.
    logits : (T, E) array of float32
        The router's output, for at most 512 experts.
    experts : (T, k) array of int32
        Result of `moe_route`: distinct experts of each token. Groups and a correction only choose
        them and have no gradient.
    score : "softmax" or "sigmoid"
    renormalize, scale
        See `moe_route`.
    out : (T, E) array of float32, optional
        Array for the result.

    Returns
    -------
    (T, E) array of float32
        With softmax scores that are renormalized, 0 for experts that were not chosen.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Computed in float32; the sums over a token's experts have a fixed order.

    Examples
    --------
    >>> import numpy as np
    >>> logits = np.log(np.array([[1.0, 1.0, 2.0]], np.float32))
    >>> experts = np.array([[2, 0]], np.int32)
    >>> moe_route_backward(np.array([[9.0, 0.0]], np.float32), logits, experts).round(4)
    array([[-2.,  0.,  2.]], dtype=float32)
    """
    call = Contract("moe_route_backward")
    logits = call.array("logits", logits, "T E", (FLOAT32, FLOAT64))
    num_experts = call["E"]
    in_range = 1 <= num_experts <= MAX_EXPERTS
    call.check("logits", in_range, f"of 1 to {MAX_EXPERTS} experts", num_experts)
    experts = call.array("experts", experts, "T k", INT32)
    limit = min(num_experts, MAX_TOP_K)
    call.check("experts", 1 <= call["k"] <= limit, f"1 to {limit} a token", call["k"])
    call.indices("experts", experts, 0, num_experts - 1)
    dweights = call.array("dweights", dweights, "T k", logits.dtype)
    call.check("score", score in SCORES, f"one of {SCORES}", score)
    call.number("scale", scale)
    if call.on_cpu:
        result = reference.moe_route_backward(
            dweights, logits, experts, score=score, renormalize=renormalize, scale=scale
        )
        return call.finish(out, result)
    out = call.output("out", out, logits.shape, FLOAT32)
    _KERNELS[next(n for n in WIDTHS if n >= num_experts)].launch(
        specs("float32")[0],
        (ceil_div(call["T"], _WARPS),),
        (_THREADS,),
        pdl=True,
        dweights=dweights,
        logits=logits,
        experts=experts,
        dlogits=out,
        num_tokens=call["T"],
        num_experts=num_experts,
        top_k=call["k"],
        is_sigmoid=score == "sigmoid",
        renormalize=renormalize,
        scale=scale,
    )
    return out
