"""GEMM with a quantized weight: `cuda_src/gemm_wna16`, mirror `reference/gemm_wna16.py`.

For few rows of x, `few_rows.py` streams the weight. For more rows, `sm90.py` decodes it on its way
to Hopper's tensor cores; on other chips, `portable.py` dequantizes it before a dense GEMM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine import device
from engine.dtypes import BFLOAT16
from engine.kernels import _cpu
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._module import ModuleSpec
from engine.kernels._packed import SAMPLE, check_weight
from engine.kernels.dequantize import specs as dequantize_specs
from engine.kernels.gemm import operands as products
from engine.kernels.gemm import specs as gemm_specs
from engine.kernels.gemm.operands import (
    SWIGLU,
    Operands,
    check_columns,
    check_residual,
    out_dtype_of,
)
from engine.kernels.gemm_wna16 import few_rows, portable, sm90
from engine.kernels.gemm_wna16.few_rows import FewRowsConfig
from engine.kernels.gemm_wna16.sm90 import HopperConfig
from engine.kernels.permute_columns import permute_columns
from engine.kernels.permute_columns import specs as permute_specs
from engine.kernels.swiglu import specs as swiglu_specs
from engine.kernels.swiglu import swiglu
from engine.weights import Weight
from engine.weights.formats import TILE_ROWS

__all__ = ["ACTIVATIONS", "HALVES", "gemm_wna16", "launch", "specs"]

# Packed weights hold gate and up in separate row tiles; "silu_and_mul" would interleave them.
ACTIVATIONS = tuple(name for name in products.ACTIVATIONS if name != "silu_and_mul")
HALVES = (np.dtype(np.float16), BFLOAT16)


def specs(
    dtype: str,
    *,
    formats: tuple[str, ...] = (),
    patterns: bool = False,
    deterministic: bool = False,
    **_: Any,
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for weights of `formats`.

    `patterns` instead selects a sample of formats that covers every decoder.
    """
    if dtype == "float32":
        return ()
    return (
        *few_rows.specs(
            "gemm_wna16", dtype, SAMPLE if patterns else formats, deterministic=deterministic
        ),
        *sm90.specs(dtype, SAMPLE if patterns else formats, deterministic=deterministic),
        *dequantize_specs(dtype, formats=formats, patterns=patterns),
        *permute_specs(dtype),
        *gemm_specs(dtype, deterministic=deterministic),
        *swiglu_specs(dtype),
    )


def gemm_wna16(
    x: Any,
    weight: Weight,
    *,
    bias: Any = None,
    residual: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Multiply rows by a quantized weight matrix: activation(x Wᵀ + bias) + residual.

    Parameters
    ----------
    x : (M, K) array of float16 or bfloat16; on NumPy also float32
        The rows may be strided (a view). An array whose last axis is not contiguous is copied.
    weight : Weight
        A matrix (N, K) in a packed format.
    bias : (N,) array of x's dtype, optional
    residual : (M, N) array of the result's dtype, optional
        Added last; may be `out` itself.
    activation : None, "silu", "gelu" (erf), "gelu_tanh", "relu" or "swiglu"
        "swiglu": `weight` (and `bias`) hold all rows of gate, then as many of up; the result has
        N / 2 columns and x's dtype, and `residual` must be None.
    out_dtype : dtype, optional
        x's dtype (the default) or float32.
    deterministic : bool
        Sum each row in an order that does not depend on M, so that the bits of a row's result do
        not depend on the other rows. Slower for few rows.
    pdl : bool
        Promise that no kernel still running on the stream writes `weight` or `bias`; this holds for
        a model's parameters. With few rows they are then read while the preceding kernel ends.
    out : (M, N) array of `out_dtype`, optional
        Array for the result; its rows may be strided.

    Returns
    -------
    (M, N) or (M, N / 2) array of `out_dtype`

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Sums, bias, activation and residual are float32, and the result is rounded once; with "swiglu"
    some kernels also round gate and up. Kernels for few rows, and some for more in formats with
    groups of at least 64 and no minimum, multiply the integer codes and scale the sum of each
    group. Otherwise, for many rows, and with `deterministic`, the dequantized weight is rounded to
    x's dtype before the GEMM.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.weights import FORMATS
    >>> from engine.weights.quantize import quantize
    >>> weight = quantize(np.eye(2, 64, dtype=np.float32), FORMATS["mxfp4"])
    >>> gemm_wna16(np.arange(64, dtype=np.float32)[None], weight)
    array([[0., 1.]], dtype=float32)
    """
    call = Contract("gemm_wna16")
    x = call.array("x", x, "M K", FLOATS, layout="rows")
    on_cpu = call.on_cpu
    if not on_cpu and x.dtype not in HALVES:
        call.check("x", False, "float16 or bfloat16 on CUDA", str(x.dtype))
    weight = check_weight(call, weight)
    dtype = out_dtype_of(call, x.dtype, out_dtype)
    columns = check_columns(call, activation, ACTIVATIONS)
    residual = check_residual(call, activation, residual, columns, dtype)
    if activation == SWIGLU and dtype != x.dtype:
        call.check("out_dtype", False, f'{x.dtype} with "swiglu"', str(dtype))
    if bias is not None:
        bias = call.array("bias", bias, "N", x.dtype)
    if on_cpu:
        result = _cpu.gemm_wna16(
            x,
            weight,
            bias=bias,
            residual=residual,
            activation=activation,
            out_dtype=dtype,
            deterministic=deterministic,
        )
        return call.finish(out, result, layout="rows")
    out = call.output("out", out, (call["M"], columns), dtype, layout="rows")
    if weight.permutation is not None:
        x = permute_columns(x, weight.permutation)
    launch(Operands(x, weight, out, bias, residual, activation, deterministic, pdl))
    return out


def launch(operands: Operands) -> None:
    """Launch on CuPy arrays; the columns of x are in the storage order of the weight."""
    n = operands.weight.shape[0]
    if operands.x.shape[0] == 0 or n == 0:
        return
    if operands.activation == SWIGLU and n % (2 * TILE_ROWS):
        # The kernels combine whole row tiles of gate and up, so this shape needs a separate swiglu.
        packed = device.cupy().empty((operands.x.shape[0], n), operands.x.dtype)
        launch(replace(operands, activation=None, out=packed))
        swiglu(packed, out=operands.out)
        return
    config = _choose(operands)
    if isinstance(config, FewRowsConfig):
        few_rows.launch(operands, config)
    elif config is not None:
        sm90.launch(operands, config)
    else:
        portable.launch(operands)


def _choose(operands: Operands) -> FewRowsConfig | HopperConfig | None:
    """Choose the kernel for few rows or a tile of Hopper; None if neither supports the operands."""
    form = operands.weight.format
    max_rows = sm90.max_few_rows(form, deterministic=operands.deterministic)
    is_few = operands.x.shape[0] <= max_rows
    if operands.deterministic:
        # Streams have the bits of Hopper's tiles only. Without a residual they add +0, which would
        # change the -0 of an activation far below 0.
        has_bits = operands.activation in (None, SWIGLU) or operands.residual is not None
        tile = sm90.choose(operands)
        if tile is None or not (is_few and has_bits):
            return tile
        return few_rows.choose(operands) or tile
    if is_few:
        return few_rows.choose(operands) or sm90.choose(operands)
    return sm90.choose(operands) or few_rows.choose(operands)
