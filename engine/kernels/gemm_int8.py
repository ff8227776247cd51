"""Products of int8 codes: `cuda_src/gemm/gemm_int8.cu`, mirror `reference/gemm_int8.py`.

`gemm/w8.py` checks and launches, for gemm_fp8 and gemm_int8 alike.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._module import ModuleSpec
from engine.kernels.gemm.w8 import product, w8_specs

__all__ = ["gemm_int8", "specs"]


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return w8_specs("gemm_int8", dtype)


def gemm_int8(
    x: Any,
    weight: Any,
    weight_scales: Any,
    *,
    x_scales: Any = None,
    norm_weight: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    bias: Any = None,
    residual: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Multiply rows by a weight, both in int8 with scales: activation(x Wᵀ + bias) + residual.

    Parameters
    ----------
    x : (M, K) array of float32, float16 or bfloat16
        Its rows, which may lie apart, are quantized first, as quantize_rows does ("int8", in groups
        of 128). Or, with `x_scales`, codes: int8.
    weight : (N, K) array of int8
        Codes, as checkpoints have them: (out features, in features).
    weight_scales : (N,) array of float32
        Of each row.
    x_scales : (M, ceil(K / 128)) array of float32, optional
        Of groups of 128 columns of each row; (M, 1) if K is 0.
    norm_weight : (K,) array of x's dtype, optional
        The rows are normalised by rmsnorm with `eps` and `weight_offset` before they are quantized.
    eps, weight_offset : float
        As rmsnorm's.
    bias : (N,) array, optional
        Of x's dtype; with codes, of `out_dtype`, or any dtype if that is float32.
    residual, activation, deterministic, out
        As gemm's.
    out_dtype : dtype, optional
        x's dtype (the default) or float32; with codes, any of the three, and needed.
    pdl : bool
        As gemm's; it is said of `weight_scales` and `norm_weight` too.

    Returns
    -------
    (M, N) or (M, N / 2) array of `out_dtype`

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    The sum of a group's products of codes is exact; groups are added in float32. Scales, bias,
    activation and residual are float32, with one rounding at the end.

    Examples
    --------
    >>> import numpy as np
    >>> x, weight = np.array([[1.0, -1.0]], np.float32), np.array([[3, 1]], np.int8)
    >>> gemm_int8(x, weight, np.ones(1, np.float32)).round(3)
    array([[2.]], dtype=float32)
    """
    return product(
        "int8",
        reference.gemm_int8,
        x,
        weight,
        weight_scales,
        x_scales=x_scales,
        norm_weight=norm_weight,
        eps=eps,
        weight_offset=weight_offset,
        bias=bias,
        residual=residual,
        activation=activation,
        out_dtype=out_dtype,
        deterministic=deterministic,
        pdl=pdl,
        out=out,
    )
