"""Products of tokens with their experts' matrices: `cuda_src/moe_gemm/`.

`few_tokens.py`, `portable.py` and the `sm90.py` launch them; the mirror is `reference/moe_gemm.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine import reference
from engine.device import empty_like
from engine.dtypes import dtype_name
from engine.errors import ShapeError
from engine.kernels._contract import FLOAT32, FLOATS, INT32, Contract
from engine.kernels._launch import ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._packed import check_planes
from engine.kernels._quantize import GROUP, new_codes
from engine.kernels.dequantize import launch as dequantize
from engine.kernels.moe_gemm import codes_sm90, few_tokens, portable, quantized_sm90, scratch, sm90
from engine.kernels.moe_gemm.operands import ACTIVATIONS, MoeOperands
from engine.kernels.quantize_rows import launch as quantize_rows
from engine.kernels.quantize_rows import specs as quantize_specs
from engine.reference import Routing
from engine.weights import FORMATS, Format, Weight
from engine.weights.formats import TILE_COLUMNS, TILE_ROWS

__all__ = ["SAMPLES", "check_product", "launch", "moe_gemm", "specs"]

_ROWS = Format("rows of x", 8, (1, GROUP), 32, "e4m3", activations="fp8")
SAMPLES = ("fp8_block", "int8", "mxfp4", "int4_g128", "q4_k", "q6_k")


def specs(
    dtype: str, *, formats: tuple[str, ...] = (), patterns: bool = False, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype` and weights of `formats`.

    With `patterns` the formats are a few that between them have every way to decode.
    """
    names = SAMPLES if patterns else formats
    quantized = (few_tokens, quantized_sm90, codes_sm90, scratch)
    found = [spec for module in quantized for spec in module.specs(dtype, names)]
    if any(FORMATS[name].block == (GROUP, GROUP) for name in names):
        found += quantize_specs(dtype)
    return tuple(dict.fromkeys((*portable.specs(dtype), *sm90.specs(dtype), *found)))


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
    quantize_x: bool = False,
    num_experts: int | None = None,
    out: Any = None,
) -> Any:
    """Multiply the rows that every expert has by its own matrix.

    Parameters
    ----------
    x : (T, K) array of float32, float16 or bfloat16; (P, K) with `scatter`
        The tokens; with `scatter` rows sorted by expert, as the first product returns them.
    weight : (E, R, K) array of x's dtype, or Weight
        A matrix (out features, in features) for every expert. With an activation the first R / 2
        rows are the gate's and the others up's. A quantized `Weight` (E, R, K) lies as
        `quantization.stack` says; in a packed format R is a multiple of 16.
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
        Sum each row in an order that does not depend on the other rows, so that a row's result has
        the same bits in any company; slower for few tokens and a quantized weight. Products with
        other weights always do.
    pdl : bool
        Say that no kernel still running on the stream writes `weight` or `bias`, nor, with
        `scatter`, `routing`: the product before, without `scatter`, waits for the routing before it
        lets the next kernel start. They are then read while the preceding kernel ends.
    quantize_x : bool
        Round rows of x to e4m3 with a scale for each 128 columns first, as `quantize_rows` does;
        only with a weight in blocks of 128 x 128 ("fp8_block").
    num_experts : int, optional
        Among how many experts the pairs are divided, by default E. Where `weight` and the offsets
        are those of some of them, the tile is chosen for the pairs that these have on average.
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

    With `quantize_x` codes are multiplied as the numbers they are, and the sums over 128 columns by
    both scales. Without it x is not quantized, whatever the format: of at most 8 tokens, codes are
    multiplied as the numbers they are, and the sum over a group by its scale; of more, quantized
    weights are rounded to x's dtype before the product, as the mirror does. Where no kernel reads
    the format for so many tokens, on a GPU that is no Hopper among others, all matrices are
    dequantized to scratch memory, a few at a time, and so are the codes of x.

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
    x, weight, routing, bias = check_product(
        call, x, weight, routing, bias, scatter=scatter, quantize_x=quantize_x
    )
    call.check("activation", activation in ACTIVATIONS, f"one of {ACTIVATIONS}", activation)
    rows = call["R"]
    if activation is not None:
        call.check("weight", rows % 2 == 0, "of as many rows of gate as of up", f"{rows} rows")
    call.number("alpha", alpha)
    call.number("limit", limit, low=0.0)
    num_experts = call["E"] if num_experts is None else num_experts
    call.number("num_experts", num_experts, low=call["E"])
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
            quantize_x=quantize_x,
        )
        return call.finish(out, result)
    columns = rows if activation is None else rows // 2
    out = call.output("out", out, (call["P"], columns), x.dtype)
    own = (x, weight, routing, out, bias, activation, alpha, limit, scatter, deterministic, pdl)
    operands = MoeOperands(*own, num_experts)
    launch(call, operands, quantize_x=quantize_x)
    return out


def launch(call: Contract, operands: MoeOperands, *, quantize_x: bool) -> None:
    """Launch on CuPy arrays that `check_product` has checked."""
    if quantize_x:
        _launch_quantized(call, operands)
    else:
        _launch(operands)


def check_product(
    call: Contract,
    x: Any,
    weight: Any,
    routing: Routing,
    bias: Any,
    *,
    scatter: bool,
    quantize_x: bool,
) -> tuple[Any, Any, Routing, Any]:
    """Return x, weight, routing and bias, which `call` has checked; a dense weight as an array."""
    experts = call.array("routing.experts", routing.experts, "T k", INT32)
    call.bind("P", call["T"] * call["k"], "routing.experts")
    x = call.array("x", x, "P K" if scatter else "T K", FLOATS)
    if isinstance(weight, Weight) and weight.format.is_dense:
        weight = weight.data
    if isinstance(weight, Weight):
        weight = _check_quantized(call, weight)
    else:
        weight = call.array("weight", weight, "E R K", x.dtype)
    weights = call.array("routing.weights", routing.weights, "T k", FLOAT32)
    order = call.array("routing.order", routing.order, "P", INT32)
    offsets = call.array("routing.offsets", routing.offsets, f"{call['E'] + 1}", INT32)
    if quantize_x:
        is_possible = isinstance(weight, Weight) and weight.format.block == (GROUP, GROUP)
        call.check("weight", is_possible, "in blocks of 128 x 128 with quantize_x", _name(weight))
    if bias is not None:
        bias = call.array("bias", bias, "E R", x.dtype)
    return x, weight, Routing(experts, weights, order, offsets), bias


def _launch_quantized(call: Contract, operands: MoeOperands) -> None:
    """Launch for the codes of x, or for the numbers that these are."""
    rows, columns = operands.x.shape
    codes, scales = new_codes(call, rows, columns, "fp8", GROUP)
    # So that the product may read the routing while these are written: before the second product
    # the routing is there in any case, as `pdl` says.
    is_late = not operands.scatter
    quantize_rows(operands.x, codes, scales, dtype="fp8", group=GROUP, is_late=is_late)
    if codes_sm90.is_possible(operands):
        codes_sm90.launch(operands, codes, scales)
        return
    numbers = empty_like(operands.x)
    dequantize(Weight(_ROWS, codes, codes.shape, scales), dtype_name(numbers.dtype), numbers)
    _launch(replace(operands, x=numbers))


def _launch(operands: MoeOperands) -> None:
    """Launch the kernels that are for these operands."""
    if not isinstance(operands.weight, Weight):
        (sm90 if sm90.is_possible(operands) else portable).launch(operands)
    elif (config := few_tokens.choose(operands)) is not None:
        few_tokens.launch(operands, config)
    else:
        (quantized_sm90 if quantized_sm90.is_possible(operands) else scratch).launch(operands)


def _name(weight: Any) -> str:
    return weight.format.name if isinstance(weight, Weight) else dtype_name(weight.dtype)


def _check_quantized(call: Contract, weight: Weight) -> Weight:
    """Check a quantized weight (E, R, K), and bind its sizes."""
    form = weight.format
    shape = weight.shape
    call.check("weight", len(shape) == 3, "of shape (E, R, K)", shape)
    for symbol, size in zip("ERK", shape, strict=True):
        if call.bind(symbol, size, "weight") != size:
            raise ShapeError(
                f"{call.op}: weight: must have shape (E, R, K) with {symbol} = {call[symbol]}; "
                f"got {shape}"
            )
    call.check("weight", weight.permutation is None, "without permuted columns", form.name)
    num_experts, rows, k = shape
    if form.is_packed:
        call.check("weight", rows % TILE_ROWS == 0, f"of a multiple of {TILE_ROWS} rows", rows)
        check_planes(call, weight, num_experts * rows // TILE_ROWS, ceil_div(k, TILE_COLUMNS))
        return weight
    assert form.block is not None
    high, wide = form.block
    blocks = f"{num_experts} {ceil_div(rows, high)}" + (f" {ceil_div(k, wide)}" if wide else "")
    code = np.dtype(np.int8 if form.code == "int" else np.uint8)
    call.array("weight.data", weight.data, f"{num_experts} {rows} {k}", code)
    call.array("weight.scales", weight.scales, blocks, FLOAT32)
    return weight
