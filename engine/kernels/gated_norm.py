"""RMSNorm with an output gate: `cuda_src/gated_norm.cu`, `reference/gated_norm.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import is_aligned, named_strides, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["ACTIVATIONS", "gated_norm", "specs"]

ACTIVATIONS = ("silu", "sigmoid")
_THREADS = 128  # kThreads in CUDA
_PARAMS = (
    "x:ptr z:ptr weight:ptr out:ptr x_stride_t:i64 x_stride_h:i64 z_stride_t:i64 z_stride_h:i64 "
    "weight_stride_h:i64 num_rows:i64 num_heads:i32 head_dim:i32 eps:f32 is_silu:i32 "
    "gate_first:i32"
)
_KERNELS = {
    name: Kernel(f"gated_norm_{name}", _PARAMS, struct="GatedNormParams")
    for name in ("short_1", "short_2", "long_vector", "long_scalar")
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("gated_norm.cu", dtype),)


def gated_norm(
    x: Any,
    z: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    gate_first: bool = False,
    pdl: bool = True,
    out: Any = None,
) -> Any:
    """Normalise each head by its root mean square and multiply it by a gate.

    Parameters
    ----------
    x : (T, H, D) array of float32, float16 or bfloat16 (NumPy: or float64)
        Rows of heads, or of groups of channels. A view whose last axis is contiguous is not copied.
    z : (T, H, D) array of x's dtype
        Gate before its activation; a view like x.
    weight : (D,) or (H, D) array of x's dtype
        One weight for all heads, or one for each.
    eps : float
        Added to the mean square.
    activation : "silu" or "sigmoid"
        Of the gate.
    gate_first : bool
        Multiply by the gate before the norm (Mamba-2) instead of after it (gated delta net, KDA).
    pdl : bool
        Programmatic dependent launch.
    out : (T, H, D) array of x's dtype, optional
        Array for the result, C-contiguous; may be `x` or `z`.

    Returns
    -------
    out : (T, H, D) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    y = x / sqrt(mean(x^2) + eps) * weight * activation(z), in float32, rounded once. With
    `gate_first`, x * activation(z) takes x's place and the last factor is 1.

    Examples
    --------
    >>> import numpy as np
    >>> x, z = np.array([[[3.0, 4.0]]], np.float32), np.zeros((1, 1, 2), np.float32)
    >>> gated_norm(x, z, np.ones(2, np.float32), activation="sigmoid").round(4)
    array([[[0.4243, 0.5657]]], dtype=float32)
    """
    call = Contract("gated_norm")
    x = call.array("x", x, "T H D", MIRROR_FLOATS, layout="rows")
    z = call.array("z", z, "T H D", x.dtype, layout="rows")
    shape = "D" if getattr(weight, "ndim", 1) == 1 else "H D"
    weight = call.array("weight", weight, shape, x.dtype)
    eps = call.number("eps", eps, low=0.0)
    call.check("activation", activation in ACTIVATIONS, f"one of {ACTIVATIONS}", activation)
    options: dict[str, Any] = {"eps": eps, "activation": activation, "gate_first": gate_first}
    if call.on_cpu:
        return call.finish(out, reference.gated_norm(x, z, weight, **options))
    out = call.output("out", out, x.shape, x.dtype)
    _launch(x, z, weight, out, pdl=pdl, **options)
    return out


def choose_kernel(head_dim: int, width: int, *, is_aligned: bool) -> str:
    """Return the kernel for heads of `head_dim` features and vectors of `width`.

    Examples
    --------
    >>> choose_kernel(128, 8, is_aligned=True), choose_kernel(4096, 8, is_aligned=True)
    ('short_1', 'long_vector')
    """
    if not is_aligned or head_dim % width:
        return "long_scalar"
    if head_dim > 256:
        return "long_vector"
    return "short_1" if head_dim <= 128 else "short_2"


def _launch(
    x: Any, z: Any, weight: Any, out: Any, *, pdl: bool, activation: str, **options: Any
) -> None:
    num_tokens, num_heads, head_dim = x.shape
    kernel = choose_kernel(head_dim, vector_width(x), is_aligned=is_aligned(x, z, weight, out))
    num_rows = num_tokens * num_heads
    rows_per_block = _THREADS // 32 if kernel.startswith("short") else 1
    _KERNELS[kernel].launch(
        specs(dtype_name(x.dtype))[0],
        (ceil_div(num_rows, rows_per_block),),
        (_THREADS,),
        pdl=pdl,
        x=x,
        z=z,
        weight=weight,
        out=out,
        **named_strides("th", x=x, z=z),
        weight_stride_h=0 if weight.ndim == 1 else head_dim,
        num_rows=num_rows,
        num_heads=num_heads,
        head_dim=head_dim,
        is_silu=activation == "silu",
        **options,
    )
