"""Sum of each token's expert outputs: `cuda_src/moe_combine.cu`, `reference/moe_combine.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOAT32, FLOAT64, INT32, MIRROR_FLOATS, Contract
from engine.kernels._elementwise import MAX_GRID_Y, is_aligned, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels.moe_route import checked_routing
from engine.reference import Routing

__all__ = ["moe_combine", "specs"]

_THREADS = 128  # kThreads in CUDA
_PARAMS = (
    "pairs:ptr experts:ptr weights:ptr identity:ptr shared:ptr shared_gate:ptr residual:ptr "
    "out:ptr num_tokens:i64 top_k:i32 num_features:i32 first_identity:i32"
)
_VECTOR = Kernel("moe_combine_vector", _PARAMS)
_SCALAR = Kernel("moe_combine_scalar", _PARAMS)
_IDENTITY_VECTOR = Kernel("moe_combine_identity_vector", _PARAMS)
_IDENTITY_SCALAR = Kernel("moe_combine_identity_scalar", _PARAMS)


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("moe_combine.cu", dtype),)


def moe_combine(
    pairs: Any,
    *,
    routing: Routing | None = None,
    num_identity: int = 0,
    identity: Any = None,
    shared: Any = None,
    shared_gate: Any = None,
    residual: Any = None,
    out: Any = None,
) -> Any:
    """Sum the outputs of each token's experts.

    Parameters
    ----------
    pairs : (T, k, N) array of float32, float16 or bfloat16
        Result of `moe_gemm` with `scatter`, already multiplied by the routing weights.
    routing : Routing, optional
        Routing of the T tokens; required with `num_identity`.
    num_identity : int
        The last so many experts of the routing return their input: their rows of `pairs` are not
        read.
    identity : (T, N) array of pairs' dtype, optional
        That input: each such expert contributes its weight times it, or nothing without it.
    shared : (T, N) array of pairs' dtype, optional
        Output of the shared expert.
    shared_gate : (T, 1) array of pairs' dtype, optional
        Logit; `shared` is multiplied by its sigmoid.
    residual : (T, N) array of pairs' dtype, optional
        Added last; may be `out`.
    out : (T, N) array of pairs' dtype, optional
        Array for the result.

    Returns
    -------
    (T, N) array of pairs' dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Sums are float32, in the order of the experts' ranks, then shared, then residual; rounded once.
    Experts that return their input are the zero-computation experts of [1]_.

    References
    ----------
    .. [1] Jin et al.: MoE++, arXiv:2410.07348.

    Examples
    --------
    >>> import numpy as np
    >>> moe_combine(np.arange(8, dtype=np.float32).reshape(2, 2, 2))
    array([[ 2.,  4.],
           [10., 12.]], dtype=float32)
    """
    call = Contract("moe_combine")
    pairs = call.array("pairs", pairs, "T k N", MIRROR_FLOATS)
    routed, identity = _checked_identity(call, pairs, routing, num_identity, identity)
    if shared is not None:
        shared = call.array("shared", shared, "T N", pairs.dtype)
    call.check("shared_gate", shared_gate is None or shared is not None, "None without shared", "")
    if shared_gate is not None:
        shared_gate = call.array("shared_gate", shared_gate, "T 1", pairs.dtype)
    if residual is not None:
        residual = call.array("residual", residual, "T N", pairs.dtype)
    if call.on_cpu:
        result = reference.moe_combine(
            pairs,
            routing=routed,
            num_identity=num_identity,
            identity=identity,
            shared=shared,
            shared_gate=shared_gate,
            residual=residual,
        )
        return call.finish(out, result)
    out = call.output("out", out, (call["T"], call["N"]), pairs.dtype)
    _launch(pairs, routed, num_identity, identity, shared, shared_gate, residual, out)
    return out


def _checked_identity(
    call: Contract, pairs: Any, routing: Routing | None, num_identity: int, identity: Any
) -> tuple[Routing | None, Any]:
    """Check and return the routing of experts that return their input, None without any, and it."""
    if not num_identity:
        call.check("identity", identity is None, "None without num_identity", "an array")
        return None, None
    call.check("routing", routing is not None, "given with num_identity", None)
    assert routing is not None
    routing = checked_routing(call, routing)
    experts = call.array("routing.experts", routing.experts, "T k", INT32)
    weights = call.array("routing.weights", routing.weights, "T k", (FLOAT32, FLOAT64))
    offsets = call.array("routing.offsets", routing.offsets, "F", INT32)
    call.number("num_identity", num_identity, low=0, high=call["F"] - 1)
    if identity is not None:
        identity = call.array("identity", identity, "T N", pairs.dtype)
    return routing._replace(experts=experts, weights=weights, offsets=offsets), identity


def _launch(
    pairs: Any,
    routing: Routing | None,
    num_identity: int,
    identity: Any,
    shared: Any,
    shared_gate: Any,
    residual: Any,
    out: Any,
) -> None:
    num_tokens, top_k, num_features = pairs.shape
    width = vector_width(pairs)
    moved = [one for one in (pairs, identity, shared, residual, out) if one is not None]
    fits = num_features % width == 0 and is_aligned(*moved)
    items = num_features // width if fits else num_features
    kernels = (_SCALAR, _VECTOR) if routing is None else (_IDENTITY_SCALAR, _IDENTITY_VECTOR)
    kernels[fits].launch(
        specs(dtype_name(pairs.dtype))[0],
        (ceil_div(items, _THREADS), min(num_tokens, MAX_GRID_Y)),
        (_THREADS,),
        pdl=True,
        pairs=pairs,
        experts=None if routing is None else routing.experts,
        weights=None if routing is None else routing.weights,
        identity=identity,
        shared=shared,
        shared_gate=shared_gate,
        residual=residual,
        out=out,
        num_tokens=num_tokens,
        top_k=top_k,
        num_features=num_features,
        first_identity=0 if routing is None else len(routing.offsets) - 1 - num_identity,
    )
