"""Gradient of `moe_gemm` with respect to its matrices: `cuda_src/moe_wgrad/`.

Launched by `sm90.py` and `portable.py`; the mirror is `reference/moe_wgrad.py`.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import INT32, MIRROR_FLOATS, Contract
from engine.kernels._module import ModuleSpec
from engine.kernels.moe_route import checked_offsets, checked_order, checked_routing
from engine.kernels.moe_wgrad import portable, sm90
from engine.kernels.moe_wgrad.operands import WgradOperands
from engine.reference import Routing

__all__ = ["moe_wgrad", "specs"]

_GATHERS = ("x", "dy")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (*portable.specs(dtype), *sm90.specs(dtype))


def moe_wgrad(dy: Any, x: Any, routing: Routing, *, gather: str, out: Any = None) -> Any:
    """Return the gradient of a grouped GEMM with respect to each expert's matrix.

    Parameters
    ----------
    dy : (P, R) array of x's dtype; (T, R) with gather="dy"
        Gradient with respect to the product, its rows sorted by expert.
    x : (P, K) array of float32, float16 or bfloat16; (T, K) with gather="x"
        Rows that were multiplied, sorted by expert.
    routing : Routing
        Result of `moe_route`, with P = T·k pairs and the offsets of all E experts. The weights are
        not read.
    gather : "x" or "dy"
        The operand whose rows are tokens: pair i reads row order[i] // k of it. "x" is for the
        first product of a layer, "dy" for the second.
    out : (E, R, K) array of x's dtype, optional
        Array for the result.

    Returns
    -------
    (E, R, K) array of x's dtype
        The sum of dy[i]ᵀ x[i] over the pairs of each expert; zeros for an expert without pairs.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Sums are float32, in the order of the pairs, and rounded once: the bits are the same every time.
    The gradient with respect to x is `moe_gemm` itself, with `transposed`.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.kernels import moe_route
    >>> routing = moe_route(np.array([[0.0, 9.0], [9.0, 0.0], [8.0, 0.0]], np.float32), 1)
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    >>> dy = np.ones((3, 1), np.float32)
    >>> moe_wgrad(dy, x, routing, gather="x")  # tokens 1 and 2, then token 0
    array([[[ 8., 10.]],
    <BLANKLINE>
           [[ 1.,  2.]]], dtype=float32)
    """
    call = Contract("moe_wgrad")
    routing = checked_routing(call, routing)
    experts = call.array("routing.experts", routing.experts, "T k", INT32)
    call.bind("P", call["T"] * call["k"], "routing.experts")
    call.check("gather", gather in _GATHERS, f"one of {_GATHERS}", gather)
    x = call.array("x", x, "T K" if gather == "x" else "P K", MIRROR_FLOATS)
    dy = call.array("dy", dy, "T R" if gather == "dy" else "P R", x.dtype)
    order = checked_order(call, routing.order)
    offsets = checked_offsets(call, routing.offsets, "E+1")
    call.check("routing.offsets", offsets.size > 1, "of at least one expert", offsets.shape)
    routing = Routing(experts, routing.weights, order, offsets)
    if call.on_cpu:
        return call.finish(out, reference.moe_wgrad(dy, x, routing, gather=gather))
    out = call.output("out", out, (call["E+1"] - 1, call["R"], call["K"]), x.dtype)
    operands = WgradOperands(dy, x, routing, out, gather)
    (sm90 if sm90.is_supported(operands) else portable).launch(operands)
    return out
