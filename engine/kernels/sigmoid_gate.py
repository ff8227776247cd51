"""Rows times the sigmoid of other rows: `cuda_src/sigmoid_gate.cu`, `reference/sigmoid_gate.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import GATED_PARAMS, launch_gated
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["sigmoid_gate", "specs"]

_WIDTHS = ("vector", "scalar")
_KERNELS = {width: Kernel(f"sigmoid_gate_{width}", GATED_PARAMS) for width in _WIDTHS}
_OF_HEADS = {
    width: Kernel(f"sigmoid_gate_heads_{width}", f"{GATED_PARAMS} head_dim:i32")
    for width in _WIDTHS
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("sigmoid_gate.cu", dtype),)


def sigmoid_gate(x: Any, gate: Any, *, out: Any = None) -> Any:
    """Multiply `x` by the sigmoid of `gate`: the gate of an attention's output.

    Parameters
    ----------
    x : (T, F) array of float32, float16 or bfloat16 (NumPy: or float64)
        The rows may be strided (a view).
    gate : (T, F) or (T, H) array of x's dtype
        A gate per feature, or one for F / H features: a head. The rows may be strided.
    out : (T, F) array of x's dtype, optional
        Array for the result; may be `x` or a `gate` of its shape, but must not overlap them
        otherwise.

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
    gate = call.array("gate", gate, "T H", x.dtype, layout="rows")
    num_features = call["F"]
    num_gates = call["H"]
    ok = num_gates == num_features or (num_gates > 0 and num_features % num_gates == 0)
    call.check("gate", ok, f"of a divisor of x's {num_features} features", num_gates)
    if call.on_cpu:
        return call.finish(out, reference.sigmoid_gate(x, gate), layout="rows")
    out = call.output("out", out, x.shape, x.dtype, layout="rows")
    if num_gates == num_features:
        launch_gated(_KERNELS, "sigmoid_gate.cu", gate=gate, up=x, out=out)
    else:
        options = {"head_dim": num_features // num_gates}
        launch_gated(_OF_HEADS, "sigmoid_gate.cu", gate=gate, up=x, out=out, **options)
    return out
