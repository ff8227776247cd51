"""Rows times factors: `cuda_src/scale_rows.cu`, mirror `reference/scale_rows.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import accumulation_dtype, dtype_name
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import element_strides, is_aligned, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._memory import is_same, overlaps
from engine.kernels._module import ModuleSpec

__all__ = ["scale_rows", "specs"]

_THREADS = 256  # kThreads in CUDA
_ROWS = 4  # kRows in CUDA
# Maximum blocks along the rows: few enough that a call with factor 1 ends within 10 us.
_MAX_BLOCKS = 2048
_PARAMS = (
    "x:ptr factors:ptr factor_stride:i32 out:ptr num_rows:i64 n:i64 x_stride:i64 out_stride:i64"
)
_VECTOR = Kernel("scale_rows_vector", _PARAMS)
_SCALAR = Kernel("scale_rows_scalar", _PARAMS)


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("scale_rows.cu", dtype),)


def scale_rows(x: Any, factors: Any, *, out: Any = None) -> Any:
    """Multiply each row by its factor, or all rows by one, which the device reads.

    Parameters
    ----------
    x : (M, N) array of float32, float16 or bfloat16 (NumPy: or float64)
        The rows may be strided (a view).
    factors : (M,) or (1,) array of float32 (float64 for float64 rows)
    out : (M, N) array of x's dtype, optional
        Array for the result; its rows may be strided. It may be `x`, and may not overlap it
        otherwise. A row scaled in place by 1 is neither read nor written if the factor is common.

    Returns
    -------
    out : (M, N) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    The product is computed in float32 and rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> scale_rows(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), np.array([2.0, 0.5], np.float32))
    array([[2. , 4. ],
           [1.5, 2. ]], dtype=float32)
    """
    call = Contract("scale_rows")
    x = call.array("x", x, "M N", MIRROR_FLOATS, layout="rows")
    size = "M" if getattr(factors, "shape", None) != (1,) else "1"
    factors = call.array("factors", factors, size, accumulation_dtype(x.dtype))
    if out is not None:
        out = call.written("out", out, "M N", x.dtype, layout="rows")
        is_apart = is_same(out, x) or not overlaps(out, x)
        call.check("out", is_apart, "x, or apart from it", "an overlapping view")
    if call.on_cpu:
        return call.finish(out, reference.scale_rows(x, factors), layout="rows")
    out = call.output("out", out, x.shape, x.dtype, layout="rows")
    num_rows, n = x.shape
    fits = n % vector_width(x) == 0 and is_aligned(x, out)
    items = n // vector_width(x) if fits else n
    (_VECTOR if fits else _SCALAR).launch(
        specs(dtype_name(x.dtype))[0],
        (ceil_div(items, _THREADS), min(ceil_div(num_rows, _ROWS), _MAX_BLOCKS)),
        (_THREADS,),
        pdl=True,
        x=x,
        factors=factors,
        factor_stride=0 if factors.size == 1 else 1,
        out=out,
        num_rows=num_rows,
        n=n,
        x_stride=element_strides(x)[0],
        out_stride=element_strides(out)[0],
    )
    return out
