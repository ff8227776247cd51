"""Operands of a GEMM with an epilogue, and their checks, for every weight format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.kernels._contract import FLOAT32, Contract
from engine.kernels._peer_memory import PeerMemory

__all__ = ["ACTIVATIONS", "SWIGLU", "Norm", "Operands", "activation_number", "check_columns"]
__all__ += ["check_residual", "out_dtype_of", "row_stride"]

SWIGLU = "swiglu"  # like "silu_and_mul", with all gate rows before the up rows

_NUMBERED = (None, "silu", "gelu", "gelu_tanh", "relu", "silu_and_mul")  # `enum Activation`
ACTIVATIONS: tuple[str | None, ...] = (*_NUMBERED, SWIGLU)


@dataclass(frozen=True)
class Operands:
    """Checked arrays and options of one GEMM.

    Rows of x, residual and out may be strided. With a packed weight, the columns of x are in the
    storage order of the weight.
    """

    x: Any
    weight: Any
    out: Any
    bias: Any = None
    residual: Any = None
    activation: str | None = None
    deterministic: bool = False
    pdl: bool = False
    peers: PeerMemory | None = None


@dataclass(frozen=True)
class Norm:
    """Norm before the GEMM: its weight (K,), epsilon and the offset of the weight."""

    weight: Any
    eps: float
    weight_offset: float


def activation_number(activation: str | None) -> int:
    """Return the activation's value in CUDA's `enum Activation`."""
    return _NUMBERED.index("silu_and_mul" if activation == SWIGLU else activation)


def check_columns(
    call: Contract, activation: str | None, allowed: tuple[str | None, ...] = ACTIVATIONS
) -> int:
    """Check the activation and the rows of weight (N, K); return the result's columns."""
    if activation not in allowed:
        call.check("activation", False, f"one of {allowed}", activation)
    n = call["N"]
    if activation == "silu_and_mul":
        call.check("weight", n % 16 == 0, "of 8 rows of gate and 8 of up in turn", f"{n} rows")
    elif activation == SWIGLU:
        call.check("weight", n % 2 == 0, "of as many rows of gate as of up", f"{n} rows")
    else:
        return n
    return n // 2


def check_residual(
    call: Contract, activation: str | None, residual: Any, columns: int, dtype: np.dtype[Any]
) -> Any:
    """Check and return the residual of a result with `columns` columns, or None."""
    if residual is None:
        return None
    got = getattr(residual, "shape", residual)
    call.check("residual", activation != SWIGLU, 'None with "swiglu"', got)
    shape = "M N" if columns == call["N"] else f"M {columns}"
    return call.array("residual", residual, shape, dtype, layout="rows")


def out_dtype_of(
    call: Contract, own: np.dtype[Any], wanted: Any, allowed: tuple[np.dtype[Any], ...] = ()
) -> np.dtype[Any]:
    """Return the dtype of the result: `wanted` if `allowed` (x's `own` or float32), else `own`."""
    allowed = allowed or (own, FLOAT32)
    try:
        dtype = own if wanted is None else np.dtype(wanted)
        is_allowed = dtype in allowed
    except TypeError:  # not a dtype of NumPy
        is_allowed = False
    if not is_allowed:  # the text is slow to build
        call.check("out_dtype", False, " or ".join(map(str, allowed)), wanted)
    return dtype


def row_stride(array: Any) -> int:
    """Return the distance between rows in elements."""
    return int(array.strides[0]) // int(array.itemsize)
