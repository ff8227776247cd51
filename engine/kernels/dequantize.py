"""Dequantization of weights: `cuda_src/gemm_wna16/dequantize.cu`, `reference/dequantize.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import FLOAT_NAMES, np_dtype
from engine.kernels._contract import Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._packed import (
    SAMPLE,
    check_weight,
    format_spec,
    format_specs,
    planes,
    scale_dtype,
)
from engine.weights import FORMATS, Weight
from engine.weights.formats import TILE_COLUMNS, TILE_ROWS

__all__ = ["dequantize", "launch", "specs"]

_FILE = "dequantize.cu"
_PACKED = Kernel(
    "dequantize_packed",
    "data:ptr high:ptr scales:ptr supers:ptr permutation:ptr out:ptr n:i32 k:i32 groups:i32 "
    "num_supers:i32 is_vector:i32",
    struct="DequantizeParams",
)
_BYTES = Kernel(
    "dequantize_bytes",
    "data:ptr scales:ptr out:ptr n:i32 k:i32 block_rows:i32 block_columns:i32 is_e4m3:i32 "
    "is_vector:i32",
)
_WARPS = 4  # warps per block, each with one tile
_BYTES_THREADS = 256  # threads per block
_BYTES_CODES = 16  # codes per thread
_MAX_ROWS = 65535  # maximum blocks along the rows; with more rows, blocks loop
_BYTES_MODULE = FORMATS["q8_0"]  # every module contains the kernel for row-major formats


def specs(
    dtype: str, *, formats: tuple[str, ...] = (), patterns: bool = False, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for weights of `formats`.

    `patterns` instead selects a sample of formats that covers every decoder.
    """
    names = (*SAMPLE, "fp8") if patterns else formats
    own = format_specs(_FILE, dtype, names)
    has_bytes = any(FORMATS[name].activations for name in names)
    plain = (format_spec(_FILE, dtype, _BYTES_MODULE),) if has_bytes else ()
    return tuple(dict.fromkeys((*own, *plain)))


def dequantize(weight: Weight, dtype: str, *, out: Any = None) -> Any:
    """Return the dequantized weight.

    Parameters
    ----------
    weight : Weight
        A matrix (N, K) in any quantized format.
    dtype : str
        "float32", "float16" or "bfloat16".
    out : (N, K) array of `dtype`, optional
        Array for the result.

    Returns
    -------
    (N, K) array of `dtype`

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Computed in float32 and rounded once. Columns are in logical order.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.weights.quantize import quantize
    >>> weight = quantize(np.array([[-1.0, 0.5, 0.0]], np.float32), FORMATS["mxfp4"])
    >>> dequantize(weight, "float32")
    array([[-1. ,  0.5,  0. ]], dtype=float32)
    """
    call = Contract("dequantize")
    call.check("dtype", dtype in FLOAT_NAMES, f"one of {FLOAT_NAMES}", dtype)
    weight = check_weight(call, weight, is_packed=False)
    if call.on_cpu:
        return call.finish(out, reference.dequantize(weight, dtype))
    out = call.output("out", out, weight.shape, np_dtype(dtype))
    launch(weight, dtype, out, weight.permutation)
    return out


def launch(weight: Weight, dtype: str, out: Any, permutation: Any = None) -> None:
    """Launch on checked CuPy arrays; without `permutation`, columns stay in storage order."""
    n, k = weight.shape
    if n == 0 or k == 0:
        return
    size = out.itemsize
    is_vector = out.data.ptr % 16 == 0 and k * size % 16 == 0
    if not weight.format.is_packed:
        _launch_bytes(weight, dtype, out, is_vector and k % _BYTES_CODES == 0)
        return
    tiles = ceil_div(n, TILE_ROWS) * ceil_div(k, TILE_COLUMNS)
    _PACKED.launch(
        format_spec(_FILE, dtype, weight.format, scale_dtype(weight)),
        (ceil_div(tiles, _WARPS),),
        (_WARPS * 32,),
        permutation=permutation,
        out=out,
        n=n,
        k=k,
        is_vector=is_vector,
        **planes(weight),
    )


def _launch_bytes(weight: Weight, dtype: str, out: Any, is_vector: bool) -> None:
    n, k = weight.shape
    assert weight.format.block is not None
    block_rows, block_columns = weight.format.block
    _BYTES.launch(
        format_spec(_FILE, dtype, _BYTES_MODULE),
        (ceil_div(k, _BYTES_THREADS * _BYTES_CODES), min(n, _MAX_ROWS)),
        (_BYTES_THREADS,),
        data=weight.data,
        scales=weight.scales,
        out=out,
        n=n,
        k=k,
        block_rows=block_rows,
        block_columns=block_columns or k,
        is_e4m3=weight.format.code == "e4m3",
        is_vector=is_vector and weight.data.data.ptr % _BYTES_CODES == 0,
    )
