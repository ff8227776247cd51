"""Grouped GEMM of tokens with their experts' matrices: `cuda_src/moe_gemm/`.

Launched by `few_tokens.py`, `portable.py` and the `sm90.py` files; mirror `reference/moe_gemm.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from engine import reference
from engine.device import empty_like
from engine.dtypes import dtype_name
from engine.errors import ShapeError
from engine.kernels._contract import FLOAT32, FLOAT64, FLOATS, INT32, MIRROR_FLOATS, Contract
from engine.kernels._launch import ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._packed import check_planes
from engine.kernels._quantize import CODES, GROUP, new_codes, num_scales
from engine.kernels.dequantize import launch as dequantize
from engine.kernels.gemm.operands import out_dtype_of
from engine.kernels.moe_gemm import codes_sm90, few_tokens, portable, quantized_sm90, scratch, sm90
from engine.kernels.moe_gemm.operands import ACTIVATIONS, MoeOperands
from engine.kernels.moe_route import checked_offsets, checked_order, checked_routing
from engine.kernels.quantize_rows import launch as quantize_rows
from engine.kernels.quantize_rows import specs as quantize_specs
from engine.reference import Routing
from engine.weights import FORMATS, Format, Weight
from engine.weights.formats import TILE_COLUMNS, TILE_ROWS

__all__ = ["SAMPLES", "MoeProduct", "check_product", "moe_gemm", "specs"]

_ROWS = Format("rows of x", 8, (1, GROUP), 32, "e4m3", activations="fp8")
SAMPLES = ("fp8_block", "int8", "mxfp4", "int4_g128", "q4_k", "q6_k")


class MoeProduct(NamedTuple):
    """Checked arguments of a product of experts.

    Attributes
    ----------
    x, x_scales : array, array or None
        Rows; with scales, codes.
    dtype : dtype
        Dtype of the rows that x holds or is quantized from: the result's.
    weight, routing, bias
        See `moe_gemm`.
    """

    x: Any
    x_scales: Any
    dtype: Any
    weight: Any
    routing: Routing
    bias: Any


def specs(
    dtype: str,
    *,
    formats: tuple[str, ...] = (),
    patterns: bool = False,
    transposed: bool = False,
    **_: Any,
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype` and weights of `formats`.

    `patterns` instead selects a sample of formats that covers every decoder. `transposed` adds the
    modules for transposed matrices.
    """
    names = SAMPLES if patterns else formats
    quantized = (few_tokens, quantized_sm90, codes_sm90, scratch)
    found = [spec for module in quantized for spec in module.specs(dtype, names)]
    if any(FORMATS[name].block == (GROUP, GROUP) for name in names):
        found += quantize_specs(dtype)
    for across in (False, True) if patterns or transposed else (False,):
        found += [*portable.specs(dtype, transposed=across), *sm90.specs(dtype, transposed=across)]
    return tuple(dict.fromkeys(found))


def moe_gemm(
    x: Any,
    weight: Any,
    routing: Routing,
    *,
    x_scales: Any = None,
    bias: Any = None,
    activation: str | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    scatter: bool = False,
    weighted: bool = True,
    transposed: bool = False,
    deterministic: bool = False,
    pdl: bool = False,
    quantize_x: bool = False,
    quantize_out: bool = False,
    num_experts: int | None = None,
    out_dtype: Any = None,
    out: Any = None,
) -> Any:
    """Multiply each expert's rows by its matrix (grouped GEMM).

    Parameters
    ----------
    x : (T, K) array of float32, float16 or bfloat16; (P, K) with `scatter`
        The tokens; with `scatter`, rows sorted by expert, as returned by the first GEMM. With
        `x_scales`, codes: uint8 (bits of e4m3).
    weight : (E, R, K) array of x's dtype, or Weight
        One matrix (out features, in features) per expert. With an activation, the first R / 2 rows
        are gate, the others up. A quantized `Weight` (E, R, K) has the layout of
        `weights.stack`; in a packed format R is a multiple of 16.
    routing : Routing
        Result of `moe_route`, with P = T·k pairs.
    x_scales : (T, ceil(K / 128)) or (P, ceil(K / 128)) array of float32, optional
        Scales of x, as returned by `quantize_rows`. Like `quantize_x`, for "fp8_block" only.
    bias : (E, R) array of `out_dtype`, optional
    activation : None, "swiglu", "geglu" or "swiglu_clamped"
        silu(gate) · up, gelu(gate) · up (the tanh approximation), or gpt-oss's
        (clip(up, -limit, limit) + 1) · g · sigmoid(alpha·g) with g = min(gate, limit).
    alpha, limit : float
        Constants of "swiglu_clamped".
    scatter : bool
        False: result row i is the product of token order[i] // k and its expert's matrix. True:
        result row order[i] is the product of row i of `x` and that matrix, times the routing weight
        of pair order[i].
    weighted : bool
        False: with `scatter`, do not apply the routing weights. Dense weights only.
    transposed : bool
        True: `weight` is (E, K, R), and x is multiplied by the transpose of each matrix, as in the
        gradient with respect to the input of a product. Dense weights without bias or activation.
    deterministic : bool
        Sum each row in an order that does not depend on the other rows, so that the bits of its
        result do not depend on the batch. Slower for few tokens with a quantized weight; dense
        weights are always deterministic.
    pdl : bool
        Promise that no kernel still running on the stream writes `weight` or `bias` or, with
        `scatter`, `routing`; they are then read while the preceding kernel ends. (The first GEMM,
        without `scatter`, waits for the routing before it lets the next kernel start.)
    quantize_x : bool
        First quantize rows of x to e4m3 with a scale per 128 columns, like `quantize_rows`. Only
        for a weight in blocks of 128 x 128 ("fp8_block").
    quantize_out : bool
        Return rows quantized to e4m3 with a scale per 128 columns, like `quantize_rows`: x and
        `x_scales` of the second GEMM. Not with `scatter` or `out`.
    num_experts : int, optional
        Number of experts that share the pairs, by default E. Needed if `weight` and the offsets
        cover only some of the experts: the tile is chosen for the average pairs per expert.
    out_dtype : dtype, optional
        Dtype of the result: x's, or with `x_scales` any of the three, which then is required.
    out : (P, R) or, with an activation, (P, R / 2) array of `out_dtype`, optional
        Array for the result.

    Returns
    -------
    (P, R) or (P, R / 2) array of `out_dtype`; with `quantize_out` codes and scales:
        (P, R) or (P, R / 2) array of uint8, (P, ceil(R / 128)) or (P, ceil(R / 256)) of float32

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Sums, bias, activation and the pairs' weights are float32; the result is rounded once. Experts
    without tokens cost nothing: their matrices are not read.

    With `quantize_x` or `x_scales`, codes are multiplied, and the sum over each 128 columns is
    multiplied by both scales. Otherwise x is not quantized, whatever the format. For at most 8
    tokens, the weight's codes are multiplied and the sum of each group is scaled; for more,
    quantized weights are rounded to x's dtype before the GEMM, as in the mirror. If no kernel
    supports the format for that many tokens, for example on GPUs before Hopper, all matrices (and
    the codes of x) are dequantized to scratch memory, a few at a time.

    `quantize_out` rounds to `out_dtype` first. On Hopper it takes no launch of its own if codes are
    multiplied and an activation leaves a multiple of 128 columns.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.kernels import moe_route
    >>> routing = moe_route(np.array([[0.0, 9.0], [9.0, 0.0]], np.float32), 1)
    >>> weight = np.array([[[1.0, 0.0]], [[0.0, 1.0]]], np.float32)  # expert 1 selects column 1
    >>> moe_gemm(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), weight, routing).ravel()
    array([3., 2.], dtype=float32)
    """
    call = Contract("moe_gemm")
    checked = check_product(
        call,
        x,
        weight,
        routing,
        bias,
        x_scales=x_scales,
        out_dtype=out_dtype,
        scatter=scatter,
        quantize_x=quantize_x,
        transposed=transposed,
    )
    x, x_scales, dtype, weight, routing, bias = checked
    _check_plain(call, weight, bias, activation, weighted=weighted, transposed=transposed)
    call.check("activation", activation in ACTIVATIONS, f"one of {ACTIVATIONS}", activation)
    rows = call["R"]
    if activation is not None:
        call.check("weight", rows % 2 == 0, "of as many rows of gate as of up", f"{rows} rows")
    call.number("alpha", alpha)
    call.number("limit", limit, low=0.0)
    num_experts = call["E"] if num_experts is None else num_experts
    call.number("num_experts", num_experts, low=call["E"])
    call.check("quantize_out", not (quantize_out and scatter), "False with scatter", quantize_out)
    given = getattr(out, "shape", out)
    call.check("out", not quantize_out or out is None, "None with quantize_out", given)
    if call.on_cpu:
        result = reference.moe_gemm(
            x,
            weight,
            routing,
            x_scales=x_scales,
            bias=bias,
            activation=activation,
            alpha=alpha,
            limit=limit,
            scatter=scatter,
            weighted=weighted,
            transposed=transposed,
            deterministic=deterministic,
            quantize_x=quantize_x,
            quantize_out=quantize_out,
            out_dtype=out_dtype,
        )
        return result if quantize_out else call.finish(out, result)
    shape = (call["P"], rows if activation is None else rows // 2)
    has_codes = quantize_x or x_scales is not None
    own = (bias, activation, alpha, limit, scatter, deterministic, pdl, num_experts)
    more: dict[str, Any] = {"transposed": transposed, "weighted": weighted}
    if not quantize_out:
        out = call.output("out", out, shape, dtype)
        _run(call, MoeOperands(x, weight, routing, out, *own, **more), checked, has_codes=has_codes)
        return out
    codes, scales = new_codes(call, *shape, "fp8", GROUP)
    operands = MoeOperands(x, weight, routing, codes, *own, **more, out_scales=scales)
    if has_codes and codes_sm90.is_supported(operands, dtype):
        _run(call, operands, checked, has_codes=True)
    else:
        numbers = call.output("numbers", None, shape, dtype)
        operands = replace(operands, out=numbers, out_scales=None)
        _run(call, operands, checked, has_codes=has_codes)
        quantize_rows(numbers, codes, scales, dtype="fp8", group=GROUP)
    return codes, scales


def check_product(
    call: Contract,
    x: Any,
    weight: Any,
    routing: Routing,
    bias: Any,
    *,
    x_scales: Any,
    out_dtype: Any,
    scatter: bool,
    quantize_x: bool,
    transposed: bool = False,
) -> MoeProduct:
    """Check and return the arguments; a dense weight becomes an array."""
    routing = checked_routing(call, routing)
    experts = call.array("routing.experts", routing.experts, "T k", INT32)
    call.bind("P", call["T"] * call["k"], "routing.experts")
    count = "P" if scatter else "T"
    is_coded = x_scales is not None
    x = call.array("x", x, f"{count} K", (CODES["fp8"],) if is_coded else MIRROR_FLOATS)
    if is_coded:
        x_scales = call.array(
            "x_scales", x_scales, f"{count} {num_scales(call['K'], GROUP)}", FLOAT32
        )
        call.check("quantize_x", not quantize_x, "False with x_scales", quantize_x)
        call.check("out_dtype", out_dtype is not None, "given with x_scales", out_dtype)
    dtype = out_dtype_of(call, x.dtype, out_dtype, FLOATS if is_coded else (x.dtype,))
    if isinstance(weight, Weight) and weight.format.is_dense:
        weight = weight.data
    if isinstance(weight, Weight):
        weight = _check_quantized(call, weight)
    else:
        weight = call.array("weight", weight, "E K R" if transposed else "E R K", x.dtype)
    weights = call.array("routing.weights", routing.weights, "T k", (FLOAT32, FLOAT64))
    order = checked_order(call, routing.order)
    offsets = checked_offsets(call, routing.offsets, call["E"] + 1)
    if quantize_x or is_coded:
        is_supported = isinstance(weight, Weight) and weight.format.block == (GROUP, GROUP)
        call.check("weight", is_supported, "in blocks of 128 x 128 for codes of x", _name(weight))
    if bias is not None:
        bias = call.array("bias", bias, "E R", dtype)
    routing = Routing(experts, weights, order, offsets)
    return MoeProduct(x, x_scales, dtype, weight, routing, bias)


def _check_plain(
    call: Contract,
    weight: Any,
    bias: Any,
    activation: str | None,
    *,
    weighted: bool,
    transposed: bool,
) -> None:
    """Check the options that require dense weights, or no bias and no activation."""
    if not weighted or transposed:
        name = "transposed" if transposed else "weighted"
        call.check(name, not isinstance(weight, Weight), "the default with quantized weights", name)
    bare = bias is None and activation is None
    call.check("transposed", bare or not transposed, "False with a bias or activation", transposed)


def _run(call: Contract, operands: MoeOperands, checked: MoeProduct, *, has_codes: bool) -> None:
    """Launch the grouped GEMM of x or, with `has_codes`, of its codes; quantize x if needed."""
    if not has_codes:
        _launch(operands)
        return
    codes = checked.x
    scales = checked.x_scales
    dtype = checked.dtype
    is_quantized_here = scales is None
    if is_quantized_here:
        codes, scales = new_codes(call, codes.shape[0], codes.shape[1], "fp8", GROUP)
        # `is_late` completes the routing before the first GEMM starts, so the GEMM may read it
        # while x is quantized. Before the second GEMM it is complete in any case: see `pdl`.
        is_late = not operands.scatter
        quantize_rows(checked.x, codes, scales, dtype="fp8", group=GROUP, is_late=is_late)
    if codes_sm90.is_supported(operands, dtype):
        codes_sm90.launch(operands, codes, scales, dtype, has_routing=is_quantized_here)
        return
    numbers = empty_like(codes, dtype)
    dequantize(Weight(_ROWS, codes, codes.shape, scales), dtype_name(numbers.dtype), numbers)
    _launch(replace(operands, x=numbers))


def _launch(operands: MoeOperands) -> None:
    """Launch the kernel that supports these operands."""
    if not isinstance(operands.weight, Weight):
        (sm90 if sm90.is_supported(operands) else portable).launch(operands)
    elif (config := few_tokens.choose(operands)) is not None:
        few_tokens.launch(operands, config)
    else:
        (quantized_sm90 if quantized_sm90.is_supported(operands) else scratch).launch(operands)


def _name(weight: Any) -> str:
    return weight.format.name if isinstance(weight, Weight) else dtype_name(weight.dtype)


def _check_quantized(call: Contract, weight: Weight) -> Weight:
    """Check a quantized weight (E, R, K) and bind its sizes."""
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
