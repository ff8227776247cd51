"""SwiGLU with 8-bit results: `cuda_src/quantize_rows/`, mirror `reference/swiglu_quantize.py`."""

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

__all__ = ["specs", "swiglu_quantize"]

_PARAMS = "x:ptr x_stride:i64 codes:ptr scales:ptr n:i32 group:i32"
_KERNELS = {
    (dtype, size): Kernel(f"swiglu_quantize_{dtype}_{size}", _PARAMS)
    for dtype in CODES
    for size in (*SIZES, "any")
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("quantize_rows/swiglu_quantize.cu", dtype),)


def swiglu_quantize(x: Any, *, dtype: str = "fp8", group: int = 0) -> tuple[Any, Any]:
    """Multiply the upper half of each row by the SiLU of the lower half, and quantize to 8 bits.

    Parameters
    ----------
    x : (M, 2F) array of float32, float16 or bfloat16
        Rows [gate | up], which may be strided (a view).
    dtype, group
        See `quantize_rows`.

    Returns
    -------
    codes : (M, F) array of uint8 (bits of e4m3) or int8
    scales : (M, 1) or (M, ceil(F / 128)) array of float32

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Equals ``quantize_rows(swiglu(x))``, bit for bit, in one launch.

    Examples
    --------
    >>> import numpy as np
    >>> swiglu_quantize(np.array([[0.0, 100.0, 5.0, 2.0]], np.float32), dtype="int8")[0]
    array([[  0, 127]], dtype=int8)
    """
    call = Contract("swiglu_quantize")
    x = call.array("x", x, "M 2F", FLOATS, layout="rows")
    call.check("x", x.shape[1] % 2 == 0, "of even length along its last axis", x.shape)
    group = checked_group(call, dtype, group)
    if call.on_cpu:
        result: tuple[Any, Any] = reference.swiglu_quantize(x, dtype=dtype, group=group)
        return result
    m = x.shape[0]
    n = x.shape[1] // 2
    codes, scales = new_codes(call, m, n, dtype, group)
    launch_rows(_KERNELS, specs(dtype_name(x.dtype))[0], x, codes, scales, dtype, group)
    return codes, scales
