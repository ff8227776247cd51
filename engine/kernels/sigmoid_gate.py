"""Rows times the sigmoid of other rows: `cuda_src/sigmoid_gate.cu`, `reference/sigmoid_gate.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import GATED_PARAMS, launch_gated
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["sigmoid_gate", "specs"]

_KERNELS = {width: Kernel(f"sigmoid_gate_{width}", GATED_PARAMS) for width in ("vector", "scalar")}


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
    launch_gated(_KERNELS, "sigmoid_gate.cu", gate=gate, up=x, out=out)
    return out
