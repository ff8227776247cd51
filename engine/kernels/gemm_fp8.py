"""GEMM of e4m3 codes: `cuda_src/gemm/gemm_fp8.cu`, mirror `reference/gemm_fp8.py`.

gemm_fp8 and gemm_int8 are implemented in `gemm/w8.py`.
"""

from __future__ import annotations

from typing import Any

from engine.kernels._module import ModuleSpec
from engine.kernels.gemm.w8 import gemm_w8, w8_specs

__all__ = ["gemm_fp8", "specs"]


def specs(
    dtype: str, *, deterministic: bool = False, has_peers: bool = False, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`, also with the options if given."""
    return w8_specs("gemm_fp8", dtype, deterministic=deterministic, has_peers=has_peers)


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
    peers: Any = None,
    out: Any = None,
) -> Any:
    """Multiply rows by a weight, both in e4m3 with scales: activation(x Wᵀ + bias) + residual.

    Parameters
    ----------
    x : (M, K) array of float32, float16 or bfloat16
        Rows, which may be strided. They are quantized to "fp8" by `quantize_rows` first or, with
        `x_scales`, are already codes: uint8 (bits of e4m3).
    weight : (N, K) array of uint8 (bits of e4m3)
        Codes (out features, in features), as in checkpoints.
    weight_scales : (N,) or (ceil(N / 128), ceil(K / 128)) array of float32
        One scale per row, or per block of 128 x 128.
    x_scales : (M, 1) or (M, ceil(K / 128)) array of float32, optional
        One scale per row; with a weight in blocks, one per group of 128 columns of a row.
    norm_weight : (K,) array of x's dtype, optional
        Normalise the rows by `rmsnorm`, with `eps` and `weight_offset`, before they are quantized.
    eps, weight_offset : float
        See `rmsnorm`.
    bias : (N,) array, optional
        Of x's dtype. With `x_scales`: of `out_dtype`, or of any dtype if that is float32.
    residual, activation, deterministic, peers, out
        See `gemm`.
    out_dtype : dtype, optional
        x's dtype (the default) or float32. With `x_scales` it is required; all three are allowed.
    pdl : bool
        See `gemm`. Also promises that no running kernel writes `weight_scales` or `norm_weight`.

    Returns
    -------
    (M, N) or (M, N / 2) array of `out_dtype`

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Sums are float32. Hopper's tensor cores keep fewer bits of a sum, so their partial sums over 128
    columns are added in float32 registers. Scales, bias, activation and residual are float32; the
    result is rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> x, weight = np.array([[1.0, 2.0]], np.float32), np.array([[0x38, 0x40]], np.uint8)
    >>> gemm_fp8(x, weight, np.ones(1, np.float32))  # e4m3 codes of 1.0 and 2.0
    array([[5.]], dtype=float32)
    """
    return gemm_w8("fp8", **locals())
