"""Quantization of heads to e4m3, one scale per head: `cuda_src/quantize_heads.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._chip import sm_count
from engine.kernels._contract import FLOAT32, FLOATS, Contract
from engine.kernels._elementwise import element_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["quantize_heads", "specs"]

_SHAPE = "stride_t:i64 stride_h:i64 num_tokens:i32 num_heads:i32 head_dim:i32 rotate:i32"
_PEAKS = Kernel("quantize_heads_peaks", f"x:ptr offset:ptr peaks:ptr {_SHAPE}")
_CODES = Kernel("quantize_heads_codes", f"x:ptr offset:ptr peaks:ptr codes:ptr scale:ptr {_SHAPE}")
_MAX_HEAD_DIM = 256
_ROWS = 8  # rows per block, one per warp
_BLOCKS_PER_SM = 8  # blocks per SM of the kernel that computes the maxima


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("quantize_heads.cu", dtype),)


def quantize_heads(x: Any, *, offset: Any = None, rotate: bool = False) -> tuple[Any, Any]:
    """Quantize each head to e4m3, with one scale per head.

    Parameters
    ----------
    x : (T, H, D) array of float32, float16 or bfloat16
        D <= 256. A view whose last axis is contiguous is not copied.
    offset : (H, D) array of float32, optional
        Subtracted from every token first. For keys, any vector per head is valid: it shifts all
        scores of a query equally, so the softmax is unchanged (the log-sum-exp is not). The mean
        over tokens removes the keys' common component, often the largest one.
    rotate : bool
        Multiply each row by the Hadamard matrix over sqrt(D). Applied to both queries and keys, it
        preserves their products and spreads outliers of one column over all columns. D must be a
        power of 2.

    Returns
    -------
    codes : (T, H, D) array of uint8
        Bits of e4m3. On NumPy, ``codes.view(ml_dtypes.float8_e4m3fn)`` shows the values.
    scale : (H,) array of float32
        ``x`` is about ``codes * scale``; the largest magnitude of a head is mapped to 448.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    Notes
    -----
    All steps are float32 up to one rounding to nearest even, with an rms error of 2.7 %. Smoothing
    of keys follows [1]_, rotation [2]_.

    References
    ----------
    .. [1] Zhang et al.: SageAttention, arXiv:2410.02367.
    .. [2] Shah et al.: FlashAttention-3, arXiv:2407.08608, section 3.3.

    Examples
    --------
    >>> import numpy as np
    >>> codes, scale = quantize_heads(np.array([[[1.0, -2.0]]], np.float32))
    >>> from ml_dtypes import float8_e4m3fn
    >>> codes.view(float8_e4m3fn).astype(np.float32) * scale[:, None]
    array([[[ 1., -2.]]], dtype=float32)
    """
    call = Contract("quantize_heads")
    x = call.array("x", x, "T H D", FLOATS, layout="rows")
    head_dim = call["D"]
    call.check("D", 0 < head_dim <= _MAX_HEAD_DIM, f"from 1 to {_MAX_HEAD_DIM}", head_dim)
    is_power = head_dim & (head_dim - 1) == 0
    call.check("rotate", is_power or not rotate, "False unless D is a power of 2", rotate)
    if offset is not None:
        offset = call.array("offset", offset, "H D", FLOAT32)
    if call.on_cpu:
        result: tuple[Any, Any] = reference.quantize_heads(x, offset=offset, rotate=rotate)
        return result
    num_tokens, num_heads, _ = x.shape
    codes = call.xp.empty(x.shape, np.uint8)
    scale = call.xp.ones(num_heads, np.float32)
    peaks = call.xp.zeros(num_heads, np.uint32)
    spec = specs(dtype_name(x.dtype))[0]
    blocks = ceil_div(num_tokens, _ROWS)
    strides = element_strides(x)
    shared = {
        "x": x,
        "offset": offset,
        "peaks": peaks,
        "stride_t": strides[0],
        "stride_h": strides[1],
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "rotate": int(rotate),
    }
    some = min(blocks, max(1, ceil_div(_BLOCKS_PER_SM * sm_count(), max(1, num_heads))))
    _PEAKS.launch(spec, (some, num_heads), (32 * _ROWS,), **shared)
    _CODES.launch(spec, (blocks, num_heads), (32 * _ROWS,), codes=codes, scale=scale, **shared)
    return codes, scale
