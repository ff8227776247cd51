"""GEMM of int8 codes: `cuda_src/gemm/gemm_int8.cu`, mirror `reference/gemm_int8.py`.

gemm_fp8 and gemm_int8 are implemented in `gemm/w8.py`.
"""

from __future__ import annotations

from typing import Any

from engine.kernels._module import ModuleSpec
from engine.kernels.gemm.w8 import gemm_w8, w8_specs

__all__ = ["gemm_int8", "specs"]


def specs(
    dtype: str, *, deterministic: bool = False, has_peers: bool = False, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`, also with the options if given."""
    return w8_specs("gemm_int8", dtype, deterministic=deterministic, has_peers=has_peers)


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
    peers: Any = None,
    out: Any = None,
) -> Any:
    """Multiply rows by a weight, both in int8 with scales: activation(x Wᵀ + bias) + residual.

    Parameters
    ----------
    x : (M, K) array of float32, float16 or bfloat16
        Rows, which may be strided. They are quantized to "int8" in groups of 128 columns by
        `quantize_rows` first or, with `x_scales`, are already int8 codes.
    weight : (N, K) array of int8
        Codes (out features, in features), as in checkpoints.
    weight_scales : (N,) array of float32
        One scale per row.
    x_scales : (M, ceil(K / 128)) array of float32, optional
        One scale per group of 128 columns of a row; (M, 1) if K is 0.
    norm_weight, eps, weight_offset, bias, residual, activation, out_dtype, deterministic
        See `gemm_fp8`.
    peers, pdl, out
        See `gemm_fp8`.

    Returns
    -------
    (M, N) or (M, N / 2) array of `out_dtype`

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    The sum over a group is exact; groups are added in float32. Scales, bias, activation and
    residual are float32; the result is rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> x, weight = np.array([[1.0, -1.0]], np.float32), np.array([[3, 1]], np.int8)
    >>> gemm_int8(x, weight, np.ones(1, np.float32)).round(3)
    array([[2.]], dtype=float32)
    """
    return gemm_w8("int8", **locals())
