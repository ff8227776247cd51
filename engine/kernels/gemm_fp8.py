"""Products of e4m3 codes: `cuda_src/gemm/gemm_fp8.cu`, mirror `reference/gemm_fp8.py`.

`gemm/w8.py` checks and launches, for gemm_fp8 and gemm_int8 alike.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._module import ModuleSpec
from engine.kernels.gemm.w8 import product, w8_specs

__all__ = ["gemm_fp8", "specs"]


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return w8_specs("gemm_fp8", dtype)


def gemm_fp8(
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
    """Multiply rows by a weight, both in e4m3 with scales: activation(x Wᵀ + bias) + residual.

    Parameters
    ----------
    x : (M, K) array of float32, float16 or bfloat16
        Its rows, which may lie apart, are quantized first, as quantize_rows does ("fp8"). Or, with
        `x_scales`, codes: uint8 (bits of e4m3).
    weight : (N, K) array of uint8 (bits of e4m3)
        Codes, as checkpoints have them: (out features, in features).
    weight_scales : (N,) array of float32, or (ceil(N / 128), ceil(K / 128))
        Of each row, or of blocks of 128 x 128.
    x_scales : (M, 1) array of float32, optional; (M, ceil(K / 128)) with blocks
        Of each row; with blocks, of its groups of 128 columns.
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
    Products are summed in float32; Hopper's tensor cores keep fewer bits of a sum, so that partial
    sums of 128 columns are added apart. Scales, bias, activation and residual are float32, with one
    rounding at the end.

    Examples
    --------
    >>> import numpy as np
    >>> x, weight = np.array([[1.0, 2.0]], np.float32), np.array([[0x38, 0x40]], np.uint8)
    >>> gemm_fp8(x, weight, np.ones(1, np.float32))  # e4m3's 1 and 2
    array([[5.]], dtype=float32)
    """
    return product(
        "fp8",
        reference.gemm_fp8,
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
