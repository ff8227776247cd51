"""Mixtures of experts on tensors: the router's choice, and the experts' products.

The number of rows per expert stays on the device, so no op waits for the GPU. For the layer
`y[t] = sum over j of w[t, j] down[e] act(gate_up[e] x[t])`, e = ids[t, j], the backward pass is

    g        = down^T dy             dy gathered, one row per pair (token, expert)
    d_w      = g . act(h)            h = gate_up x, kept by the forward pass
    d_h      = w g act'(h)
    d_down   = dy^T (w act(h)),      d_gate_up = d_h^T x
    d_x      = sum over j of gate_up^T d_h

so neither the experts' outputs nor their gradients are stored.
"""

from __future__ import annotations

from typing import Any

import torch

from engine import kernels
from engine.dtypes import accumulation_dtype as accumulation_of
from engine.errors import ContractError, DTypeError
from engine.integrations.torch._core import define, to_autocast_dtype
from engine.integrations.torch._tensors import accumulation_dtype
from engine.kernels import Routing
from engine.kernels._contract import INT32, INT64, MIRROR_FLOATS, Contract

__all__ = ["moe_experts", "moe_route"]

# ---- router ----------------------------------------------------------------------------------


def _route(
    logits: Any,
    correction: Any,
    top_k: int,
    score: str,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[Any, Any]:
    routing = kernels.moe_route(
        logits,
        top_k,
        score=score,
        correction=correction,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalize=renormalize,
        scale=scale,
    )
    return routing.weights, routing.experts


def _fake_route(
    logits: torch.Tensor, _: Any, top_k: int, *__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


def _setup_route(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    logits, _, _, ctx.score, _, _, ctx.renormalize, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _route_backward(ctx: Any, dweights: torch.Tensor, _: Any) -> tuple[Any, ...]:
    logits, ids = ctx.saved_tensors
    dlogits = _ROUTE_BACKWARD(dweights, logits, ids, ctx.score, ctx.renormalize, ctx.scale)
    return dlogits, *(None,) * 7


_ROUTE_BACKWARD = define(
    "moe_route_backward(Tensor dweights, Tensor logits, Tensor ids, str score, bool renormalize, "
    "float scale) -> Tensor",
    lambda dweights, logits, ids, score, renormalize, scale: kernels.moe_route_backward(
        dweights, logits, ids, score=score, renormalize=renormalize, scale=scale
    ),
    lambda dweights, logits, *_: logits.new_empty(logits.shape),
)
_ROUTE = define(
    "moe_route(Tensor logits, Tensor? correction, int top_k, str score, int num_groups, "
    "int top_groups, bool renormalize, float scale) -> (Tensor, Tensor)",
    _route,
    _fake_route,
    backward=_route_backward,
    setup_context=_setup_route,
)


def moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    correction: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` experts of each token, and their weights.

    Parameters
    ----------
    logits : (T, E) tensor
        The router's output, for at most 512 experts; computed in float32.
    top_k : int
        Experts per token (k), at most 16.
    score, correction, num_groups, top_groups, renormalize, scale
        See `engine.kernels.moe_route`. `correction` and groups only choose the experts: they have
        no gradient.

    Returns
    -------
    weights : (T, k) tensor of float32
        Best first; differentiable with respect to the logits.
    ids : (T, k) tensor of int32

    Raises
    ------
    ContractError, ShapeError, DTypeError

    Examples
    --------
    >>> weights, ids = moe_route(torch.tensor([[0.0, 9.0, 9.0]]), 2)
    >>> weights, ids
    (tensor([[0.5000, 0.5000]]), tensor([[1, 2]], dtype=torch.int32))
    """
    if not logits.is_floating_point():
        raise DTypeError(f"moe_route: logits: must be floating-point; got {logits.dtype}")
    if logits.dtype != torch.float64:
        logits = logits.float()
    routed: tuple[torch.Tensor, torch.Tensor] = _ROUTE(
        logits, correction, top_k, score, num_groups, top_groups, renormalize, scale
    )
    return routed


# ---- experts ---------------------------------------------------------------------------------


def _check_experts(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> None:
    """Check sizes that the kernels see one product at a time, by the names of the caller."""
    call = Contract("moe_experts")
    call.array("x", x, "T N", MIRROR_FLOATS, layout="any")
    call.array("down", down, "E N F", x.dtype, layout="any")
    call.array("gate_up", gate_up, f"E {2 * call['F']} N", x.dtype, layout="any")
    call.array("topk_ids", ids, "T k", (INT32, INT64), layout="any")
    call.array("topk_weights", weights, "T k", accumulation_of(x.dtype), layout="any")


def _experts(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> Any:
    """Compute the layer with the activation fused into the first product."""
    _check_experts(x, gate_up, down, ids, weights)
    routing = kernels.moe_sort(ids, weights, num_experts=gate_up.shape[0])
    rows = kernels.moe_gemm(x, gate_up, routing, activation="swiglu")
    return kernels.moe_gemm_combine(rows, down, routing, pdl=True)


def _kept_experts(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> tuple[Any, ...]:
    """Return the result of the layer and, for its backward pass, h and the routing."""
    _check_experts(x, gate_up, down, ids, weights)
    routing = kernels.moe_sort(ids, weights, num_experts=gate_up.shape[0])
    h = kernels.moe_gemm(x, gate_up, routing)
    out = kernels.moe_gemm_combine(kernels.swiglu(h), down, routing, pdl=True)
    return out, h, routing.experts, routing.order, routing.offsets


def _fake_kept(
    x: torch.Tensor, gate_up: torch.Tensor, _: torch.Tensor, ids: torch.Tensor, __: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    pairs = ids.shape[0] * ids.shape[1]
    sizes = (ids.shape, (pairs,), (gate_up.shape[0] + 1,))
    routing = (ids.new_empty(size, dtype=torch.int32) for size in sizes)
    return x.new_empty(x.shape), x.new_empty((pairs, gate_up.shape[1])), *routing


def _hidden_backward(
    dout: Any, h: Any, down: Any, weights: Any, ids: Any, order: Any, offsets: Any
) -> tuple[Any, Any, Any]:
    routing = Routing(ids, weights, order, offsets)
    dy = kernels.moe_gemm(dout, down, routing, transposed=True)
    return kernels.moe_activation_backward(dy, h, routing)


def _fake_hidden_backward(
    _: Any, h: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, *__: Any
) -> tuple[torch.Tensor, ...]:
    scaled = h.new_empty((h.shape[0], down.shape[2]))
    return h.new_empty(h.shape), scaled, weights.new_empty(weights.shape)


def _dgrad(dh: Any, gate_up: Any, weights: Any, ids: Any, order: Any, offsets: Any) -> Any:
    routing = Routing(ids, weights, order, offsets)
    # No pdl: a kernel of torch may just have written gate_up, gathered from its shards.
    pairs = kernels.moe_gemm(dh, gate_up, routing, scatter=True, weighted=False, transposed=True)
    return kernels.moe_combine(pairs.reshape(*ids.shape, gate_up.shape[2]))


def _wgrad(dy: Any, x: Any, ids: Any, order: Any, offsets: Any, gather: str) -> Any:
    return kernels.moe_wgrad(dy, x, Routing(ids, None, order, offsets), gather=gather)


_HIDDEN_BACKWARD = define(
    "moe_hidden_backward(Tensor dout, Tensor h, Tensor down, Tensor weights, Tensor ids, "
    "Tensor order, Tensor offsets) -> (Tensor, Tensor, Tensor)",
    _hidden_backward,
    _fake_hidden_backward,
)
_DGRAD = define(
    "moe_dgrad(Tensor dh, Tensor gate_up, Tensor weights, Tensor ids, Tensor order, "
    "Tensor offsets) -> Tensor",
    _dgrad,
    lambda dh, gate_up, weights, ids, *_: dh.new_empty((ids.shape[0], gate_up.shape[2])),
)
_WGRAD = define(
    "moe_wgrad(Tensor dy, Tensor x, Tensor ids, Tensor order, Tensor offsets, str gather) "
    "-> Tensor",
    _wgrad,
    lambda dy, x, ids, order, offsets, _: x.new_empty(
        (offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    ),
)


def _gradients(
    needed: tuple[bool, ...],
    dout: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    kept: tuple[torch.Tensor, ...],
) -> tuple[Any, ...]:
    """Return the gradients of x, gate_up, down, ids (None) and weights."""
    x, gate_up, down, _, weights = inputs
    h, *routing = kept
    dx = dgate_up = ddown = None
    dh, scaled, dweights = _HIDDEN_BACKWARD(dout, h, down, weights, *routing)
    if needed[0]:
        dx = _DGRAD(dh, gate_up, weights, *routing)
    if needed[1]:
        dgate_up = _WGRAD(dh, x, *routing, "x")
    if needed[2]:
        ddown = _WGRAD(dout, scaled, *routing, "dy")
    return dx, dgate_up, ddown, None, dweights


def _setup_kept(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for h
    ctx.save_for_backward(*inputs, *output[1:])


def _kept_backward(ctx: Any, dout: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 5
    tensors = ctx.saved_tensors
    return _gradients(ctx.needs_input_grad, dout, tensors[:5], tensors[5:])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    """Compute the forward pass again: only calls that need no gradient use this operator."""
    inputs = ctx.saved_tensors
    return _gradients(ctx.needs_input_grad, dout, inputs, _KEPT_EXPERTS(*inputs)[1:])


_INPUTS = "(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights)"
_EXPERTS = define(
    f"moe_experts{_INPUTS} -> Tensor",
    _experts,
    lambda x, *_: x.new_empty(x.shape),
    backward=_backward,
    setup_context=_setup,
)
_KEPT_EXPERTS = define(
    f"moe_experts_kept{_INPUTS} -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _kept_experts,
    _fake_kept,
    backward=_kept_backward,
    setup_context=_setup_kept,
)


def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str = "swiglu",
) -> torch.Tensor:
    """Return the weighted sum of each token's experts.

    Parameters
    ----------
    x : (T, N) tensor of float32, float16 or bfloat16
    gate_up : (E, 2F, N) tensor of x's dtype
        For each expert the F rows of gate, then those of up: `gate_up_proj` of transformers.
        TorchTitan's `w1` and `w3` (E, F, N) need no copy if they are views of such a tensor,
        ``gate_up[:, :F]`` and ``gate_up[:, F:]``.
    down : (E, N, F) tensor of x's dtype
        `down_proj` of transformers, `w2` of TorchTitan.
    topk_ids : (T, k) tensor of int32 or int64
        Experts of each token. An id outside [0, E) selects the nearest expert.
    topk_weights : (T, k) tensor
        Factors on the experts' outputs; cast to float32.
    activation : "swiglu"

    Returns
    -------
    (T, N) tensor of x's dtype

    Raises
    ------
    ContractError
        If an argument breaks the contract.

    Notes
    -----
    Differentiable with respect to all floating-point arguments. Nothing waits for the GPU: the
    number of tokens per expert stays on the device. Gradients are summed in a fixed order, so they
    have the same bits every time. Under autocast, x and the matrices are cast.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 2.0]])
    >>> gate_up = torch.tensor([[[100.0, 0.0], [0.0, 1.0]]])  # gate selects column 0, up column 1
    >>> down = torch.tensor([[[1.0], [0.0]]])
    >>> moe_experts(x, gate_up, down, torch.tensor([[0]]), torch.tensor([[0.5]]))
    tensor([[100.,   0.]])
    """
    if activation != "swiglu":
        raise ContractError(f"moe_experts: activation: must be 'swiglu'; got {activation!r}")
    x, gate_up, down = to_autocast_dtype(x, gate_up, down)
    weights = topk_weights.to(accumulation_dtype(x.dtype))
    args = (x, gate_up, down, topk_ids, weights)
    needs_grad = torch.is_grad_enabled() and any(value.requires_grad for value in args)
    result: torch.Tensor = _KEPT_EXPERTS(*args)[0] if needs_grad else _EXPERTS(*args)
    return result
