"""Quantization of rows to 8 bits: `cuda_src/quantize_rows/`, `reference/quantize_rows.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec
from engine.kernels._quantize import (
    CODES,
    SIZES,
    checked_group,
    launch_rows,
    new_codes,
)

__all__ = ["launch", "quantize_rows", "specs"]

_PARAMS = "x:ptr x_stride:i64 codes:ptr scales:ptr n:i32 group:i32 is_late:i32"
_KERNELS = {
    (dtype, size): Kernel(f"quantize_rows_{dtype}_{size}", _PARAMS)
    for dtype in CODES
    for size in (*SIZES, "any")
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("quantize_rows/quantize_rows.cu", dtype),)


def quantize_rows(x: Any, *, dtype: str = "fp8", group: int = 0) -> tuple[Any, Any]:
    """Quantize rows to 8 bits, with one scale per row or per 128 columns of a row.

    Parameters
    ----------
    x : (M, K) array of float32, float16 or bfloat16
        The rows may be strided (a view).
    dtype : "fp8" or "int8"
        e4m3, or integers from -127 to 127.
    group : 0 or 128
        Columns per scale; 0 means the whole row.

    Returns
    -------
    codes : (M, K) array of uint8 (bits of e4m3) or int8
    scales : (M, 1) or (M, ceil(K / 128)) array of float32
        ``x`` is about ``codes * scales``; the largest magnitude is mapped to 448 or 127.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    ``codes = round(x · min(largest / peak, max float32))`` and ``scales = peak / largest``, in
    float32, rounded to nearest even. Groups of zeros have codes 0 and scale 0. A NaN makes its
    group's scale NaN, so it propagates.

    Examples
    --------
    >>> import numpy as np
    >>> codes, scales = quantize_rows(np.array([[1.0, -0.5]], np.float32), dtype="int8")
    >>> codes, (codes * scales).round(2)
    (array([[127, -64]], dtype=int8), array([[ 1. , -0.5]], dtype=float32))
    """
    call = Contract("quantize_rows")
    x = call.array("x", x, "M K", FLOATS, layout="rows")
    group = checked_group(call, dtype, group)
    if call.on_cpu:
        result: tuple[Any, Any] = reference.quantize_rows(x, dtype=dtype, group=group)
        return result
    m, n = x.shape
    codes, scales = new_codes(call, m, n, dtype, group)
    launch(x, codes, scales, dtype=dtype, group=group)
    return codes, scales


def launch(
    x: Any, codes: Any, scales: Any, *, dtype: str, group: int, is_late: bool = False
) -> None:
    """Launch on checked CuPy arrays.

    `is_late` delays the next kernel's start until the kernel before this one has ended.
    """
    spec = specs(dtype_name(x.dtype))[0]
    launch_rows(_KERNELS, spec, x, codes, scales, dtype, group, is_late=is_late)
