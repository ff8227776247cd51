"""Products of tokens with their experts' matrices: `cuda_src/gemm/moe_gemm.cu`, `moe_gemm_sm90.cu`.

`portable.py` and `sm90.py` launch them; the mirror is `reference/moe_gemm.py`.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import FLOAT32, FLOATS, INT32, Contract
from engine.kernels._module import ModuleSpec
from engine.kernels.moe_gemm import portable, sm90
from engine.kernels.moe_gemm.operands import ACTIVATIONS, MoeOperands
from engine.reference import Routing

__all__ = ["moe_gemm", "specs"]


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (*portable.specs(dtype), *sm90.specs(dtype))


def moe_gemm(
    x: Any,
    weight: Any,
    routing: Routing,
    *,
    bias: Any = None,
    activation: str | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    scatter: bool = False,
    deterministic: bool = False,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Multiply the rows that every expert has by its own matrix.

    Parameters
    ----------
    x : (T, K) array of float32, float16 or bfloat16; (P, K) with `scatter`
        The tokens; with `scatter` rows sorted by expert, as the first product returns them.
    weight : (E, R, K) array of x's dtype
        A matrix (out features, in features) for every expert. With an activation the first R / 2
        rows are the gate's and the others up's.
    routing : Routing
        From `moe_route`; P = T·k pairs.
    bias : (E, R) array of x's dtype, optional
    activation : None, "swiglu" or "swiglu_clamped"
        silu(gate) · up, or gpt-oss's (clip(up, -limit, limit) + 1) · g · sigmoid(alpha·g) with
        g = min(gate, limit).
    alpha, limit : float
        Of "swiglu_clamped".
    scatter : bool
        False: result row i is of token order[i] // k, times the matrix of its expert. True: row i
        of `x` times that matrix and times the weight of pair order[i] is result row order[i].
    deterministic : bool
        Sum each row in an order that does not depend on the other rows; the kernels always do.
    pdl : bool
        Say that no kernel still running on the stream writes `weight` or `bias`, nor, with
        `scatter`, `routing`: the product before, without `scatter`, waits for the routing before it
        lets the next kernel start. They are then read while the preceding kernel ends.
    out : (P, R) or, with an activation, (P, R / 2) array of x's dtype, optional
        Where to put the result.

    Returns
    -------
    (P, R) or (P, R / 2) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Sums, bias, activation and weight are float32; the result is rounded once. Experts without
    tokens cost nothing: their matrices are not read.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.kernels import moe_route
    >>> routing = moe_route(np.array([[0.0, 9.0], [9.0, 0.0]], np.float32), 1)
    >>> weight = np.array([[[1.0, 0.0]], [[0.0, 1.0]]], np.float32)  # expert 1 takes column 1
    >>> moe_gemm(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), weight, routing).ravel()
    array([3., 2.], dtype=float32)
    """
    call = Contract("moe_gemm")
    experts = call.array("routing.experts", routing.experts, "T k", INT32)
    call.bind("P", call["T"] * call["k"], "routing.experts")
    x = call.array("x", x, "P K" if scatter else "T K", FLOATS)
    weight = call.array("weight", weight, "E R K", x.dtype)
    weights = call.array("routing.weights", routing.weights, "T k", FLOAT32)
    order = call.array("routing.order", routing.order, "P", INT32)
    offsets = call.array("routing.offsets", routing.offsets, f"{call['E'] + 1}", INT32)
    call.check("activation", activation in ACTIVATIONS, f"one of {ACTIVATIONS}", activation)
    rows = call["R"]
    if activation is not None:
        call.check("weight", rows % 2 == 0, "of as many rows of gate as of up", f"{rows} rows")
    if bias is not None:
        bias = call.array("bias", bias, "E R", x.dtype)
    call.number("alpha", alpha)
    call.number("limit", limit, low=0.0)
    routing = Routing(experts, weights, order, offsets)
    if call.on_cpu:
        result = reference.moe_gemm(
            x,
            weight,
            routing,
            bias=bias,
            activation=activation,
            alpha=alpha,
            limit=limit,
            scatter=scatter,
            deterministic=deterministic,
        )
        return call.finish(out, result)
    columns = rows if activation is None else rows // 2
    out = call.output("out", out, (call["P"], columns), x.dtype)
    operands = MoeOperands(x, weight, routing, out, bias, activation, alpha, limit, scatter, pdl)
    if sm90.is_possible(operands):
        sm90.launch(operands)
    else:
        portable.launch(operands)
    return out
