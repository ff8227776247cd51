"""Second grouped GEMM, summed over each token's experts: `moe_gemm/moe_gemm_combine.cu`.

The mirror is `reference/moe_gemm_combine.py`.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import Contract
from engine.kernels._module import ModuleSpec
from engine.kernels.moe_combine import moe_combine
from engine.kernels.moe_combine import specs as combine_specs
from engine.kernels.moe_gemm import few_combine, few_tokens, moe_gemm
from engine.kernels.moe_gemm import specs as product_specs
from engine.kernels.moe_gemm.moe_gemm import SAMPLES, check_product
from engine.kernels.moe_gemm.operands import MoeOperands, Summed
from engine.reference import Routing
from engine.weights import Weight

__all__ = ["moe_gemm_combine", "specs"]


def specs(
    dtype: str, *, formats: tuple[str, ...] = (), patterns: bool = False, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype` and weights of `formats`."""
    own = few_tokens.specs(dtype, SAMPLES if patterns else formats, "moe_gemm_combine")
    products = product_specs(dtype, formats=formats, patterns=patterns)
    return (*own, *products, *combine_specs(dtype))


def moe_gemm_combine(
    x: Any,
    weight: Any,
    routing: Routing,
    *,
    x_scales: Any = None,
    bias: Any = None,
    shared: Any = None,
    shared_gate: Any = None,
    residual: Any = None,
    deterministic: bool = False,
    pdl: bool = False,
    quantize_x: bool = False,
    out_dtype: Any = None,
    out: Any = None,
) -> Any:
    """Multiply each expert's rows by its matrix, and sum the outputs of each token's experts.

    Parameters
    ----------
    x : (P, K) array of float32, float16 or bfloat16
        Rows sorted by expert: the result of `moe_gemm`. With `x_scales`, codes.
    weight : (E, R, K) array of x's dtype, or Weight
    routing : Routing
        Routing of T tokens to k experts each, P = T·k, with the offsets of all experts.
    x_scales : (P, ceil(K / 128)) array of float32, optional
        See `moe_gemm`.
    bias : (E, R) array of `out_dtype`, optional
        Added to an expert's output before the routing weight is applied.
    shared, shared_gate, residual : optional
        Arrays (T, R), (T, 1) and (T, R) of `out_dtype`. See `moe_combine`.
    deterministic, pdl, quantize_x : bool
        See `moe_gemm`.
    out_dtype : dtype, optional
        See `moe_gemm`.
    out : (T, R) array of `out_dtype`, optional
        Array for the result; may be `residual`.

    Returns
    -------
    (T, R) array of `out_dtype`

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Equals `moe_combine` of `moe_gemm` with `scatter`. With quantized weights it is a single kernel
    for one token, and also for up to 8 tokens if its blocks fill the multiprocessors evenly. That
    kernel does not round the experts' outputs before the sum; it is not used with
    `deterministic`, `quantize_x` or `x_scales`.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.kernels import moe_route
    >>> routing = moe_route(np.array([[2.0, 2.0]], np.float32), 2)  # both experts, a half each
    >>> weight = np.array([[[1.0, 0.0]], [[0.0, 1.0]]], np.float32)  # expert 1 selects column 1
    >>> moe_gemm_combine(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), weight, routing)
    array([[2.5]], dtype=float32)
    """
    call = Contract("moe_gemm_combine")
    x, x_scales, dtype, weight, routing, bias = check_product(
        call,
        x,
        weight,
        routing,
        bias,
        x_scales=x_scales,
        out_dtype=out_dtype,
        scatter=True,
        quantize_x=quantize_x,
    )
    call.check("shared_gate", shared_gate is None or shared is not None, "None without shared", "")
    if shared is not None:
        shared = call.array("shared", shared, "T R", dtype)
    if shared_gate is not None:
        shared_gate = call.array("shared_gate", shared_gate, "T 1", dtype)
    if residual is not None:
        residual = call.array("residual", residual, "T R", dtype)
    options = {"x_scales": x_scales, "bias": bias, "deterministic": deterministic}
    options |= {"quantize_x": quantize_x, "out_dtype": out_dtype}
    others = {"shared": shared, "shared_gate": shared_gate, "residual": residual}
    if call.on_cpu:
        result = reference.moe_gemm_combine(x, weight, routing, **options, **others)
        return call.finish(out, result)
    out = call.output("out", out, (call["T"], call["R"]), dtype)
    if isinstance(weight, Weight) and not quantize_x and x_scales is None:
        own = (x, weight, routing, out, bias, None, 0.0, 0.0, True, deterministic, pdl, call["E"])
        operands = MoeOperands(*own, summed=Summed(**others))
        if (config := few_combine.choose(operands)) is not None:
            few_tokens.launch(operands, config)
            return out
    pairs = moe_gemm(x, weight, routing, scatter=True, pdl=pdl, **options)
    return moe_combine(pairs.reshape(*routing.experts.shape, call["R"]), out=out, **others)
