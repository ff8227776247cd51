"""Column permutation: `cuda_src/permute_columns.cu`, mirror `reference/permute_columns.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOATS, INT32, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["permute_columns", "specs"]

_KERNEL = Kernel(
    "permute_columns_kernel",
    "x:ptr x_stride:i64 permutation:ptr out:ptr out_stride:i64 m:i32 n:i32 k:i32",
)
_THREADS = 256
_ROWS = 8
_MAX_BLOCKS = 65535


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("permute_columns.cu", dtype),)


def permute_columns(x: Any, permutation: Any, *, out: Any = None) -> Any:
    """Gather the columns of a matrix: y[m, k] = x[m, permutation[k]].

    Parameters
    ----------
    x : (M, N) array of float32, float16 or bfloat16
        The rows may be strided (a view).
    permutation : (K,) array of int32
        An index outside [0, N) yields a column of zeros.
    out : (M, K) array of x's dtype, optional
        Array for the result; its rows may be strided. It must not be `x`.

    Returns
    -------
    (M, K) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Examples
    --------
    >>> import numpy as np
    >>> permute_columns(np.array([[1.0, 2.0, 3.0]], np.float32), np.array([2, 0], np.int32))
    array([[3., 1.]], dtype=float32)
    """
    call = Contract("permute_columns")
    x = call.array("x", x, "M N", FLOATS, layout="rows")
    permutation = call.array("permutation", permutation, "K", INT32)
    if call.on_cpu:
        return call.finish(out, reference.permute_columns(x, permutation), layout="rows")
    m = call["M"]
    k = call["K"]
    out = call.output("out", out, (m, k), x.dtype, layout="rows")
    _KERNEL.launch(
        specs(dtype_name(x.dtype))[0],
        (ceil_div(k, _THREADS), min(ceil_div(m, _ROWS), _MAX_BLOCKS)),
        (_THREADS,),
        pdl=True,
        x=x,
        x_stride=x.strides[0] // x.itemsize,
        permutation=permutation,
        out=out,
        out_stride=out.strides[0] // out.itemsize,
        m=m,
        n=call["N"],
        k=k,
    )
    return out
