"""Rows times the sigmoid of other rows: `cuda_src/sigmoid_gate.cu`, `reference/sigmoid_gate.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import (
    MAX_GRID_Y,
    ROW_THREADS,
    element_strides,
    is_aligned,
    vector_width,
)
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["sigmoid_gate", "specs"]

_PARAMS = (
    "x:ptr gate:ptr out:ptr num_rows:i64 num_features:i32 x_stride:i64 gate_stride:i64 "
    "out_stride:i64"
)
_VECTOR = Kernel("sigmoid_gate_vector", _PARAMS)
_SCALAR = Kernel("sigmoid_gate_scalar", _PARAMS)


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("sigmoid_gate.cu", dtype),)


def sigmoid_gate(x: Any, gate: Any, *, out: Any = None) -> Any:
    """Multiply `x` by the sigmoid of `gate`: the gate of an attention's output.

    Parameters
    ----------
    x, gate : (T, F) array of float32, float16 or bfloat16 (NumPy: or float64)
        Of one dtype; the rows of each may be strided (a view).
    out : (T, F) array of x's dtype, optional
        Array for the result; may be `x` or `gate`, but must not overlap them otherwise.

    Returns
    -------
    out : (T, F) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    Notes
    -----
    out = x / (1 + exp(-gate)), in float32, rounded once [1]_.

    References
    ----------
    .. [1] Qiu et al.: Gated Attention for Large Language Models, arXiv:2505.06708.

    Examples
    --------
    >>> import numpy as np
    >>> sigmoid_gate(np.array([[2.0, 3.0]], np.float32), np.array([[0.0, 100.0]], np.float32))
    array([[1., 3.]], dtype=float32)
    """
    call = Contract("sigmoid_gate")
    x = call.array("x", x, "T F", MIRROR_FLOATS, layout="rows")
    gate = call.array("gate", gate, "T F", x.dtype, layout="rows")
    if call.on_cpu:
        return call.finish(out, reference.sigmoid_gate(x, gate), layout="rows")
    out = call.output("out", out, x.shape, x.dtype, layout="rows")
    num_rows, f = x.shape
    fits = f % vector_width(x) == 0 and is_aligned(x, gate, out)
    (_VECTOR if fits else _SCALAR).launch(
        ModuleSpec("sigmoid_gate.cu", dtype_name(x.dtype)),
        (ceil_div(f // vector_width(x) if fits else f, ROW_THREADS), min(num_rows, MAX_GRID_Y)),
        (ROW_THREADS,),
        pdl=True,
        x=x,
        gate=gate,
        out=out,
        num_rows=num_rows,
        num_features=f,
        x_stride=element_strides(x)[0],
        gate_stride=element_strides(gate)[0],
        out_stride=element_strides(out)[0],
    )
    return out
