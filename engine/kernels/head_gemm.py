"""A product per attention head: `cuda_src/head_gemm.cu`, mirror `reference/head_gemm.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._attention import are_aligned
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import MAX_GRID_Y, element_strides, named_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["head_gemm", "specs"]

_PARAMS = (
    "x:ptr weight:ptr out:ptr x_stride_t:i64 x_stride_h:i64 out_stride_t:i64 out_stride_h:i64 "
    "weight_stride_h:i64 weight_stride_row:i64 num_tokens:i32 columns:i32 depth:i32 is_vector:i32"
)
_KERNELS = {
    (tokens, across): Kernel(
        f"head_gemm_{tokens}{'_transposed' * across}", _PARAMS, struct="HeadGemmParams"
    )
    for tokens in (16, 64)
    for across in (False, True)
}
"""Kernels by tokens per block, and whether the matrices are stored transposed."""

_THREADS = 128  # kThreads in CUDA
_COLUMNS = 64  # kColumns in CUDA
_STAGES = 3  # kStages in CUDA
_ROW_BYTES = 128  # bytes of a row of a chunk


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("head_gemm.cu", dtype),)


def head_gemm(x: Any, weight: Any, *, pdl: bool = False, out: Any = None) -> Any:
    """Multiply each head of `x` by a matrix of its own.

    In multi-head latent attention: queries by the up-projection of the keys, and attention's
    results by that of the values [1]_.

    Parameters
    ----------
    x : (T, H, K) array of float32, float16 or bfloat16 (NumPy: or float64)
        A view whose last axis is contiguous is not copied.
    weight : (H, N, K) array of x's dtype
        A matrix (out features, in features) per head. A view with contiguous rows or, transposed,
        contiguous columns is not copied.
    pdl : bool
        Promise that no kernel still running on the stream writes `weight`, which is then read
        while the preceding kernel ends.
    out : (T, H, N) array of x's dtype, optional
        Array for the result.

    Returns
    -------
    (T, H, N) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Sums are float32, in the order of k; the result is rounded once.

    References
    ----------
    .. [1] DeepSeek-AI: DeepSeek-V2, arXiv:2405.04434, section 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[[1.0, 2.0], [3.0, 4.0]]])
    >>> head_gemm(x, np.array([[[1.0, 0.0]], [[0.0, 10.0]]])).tolist()
    [[[1.0], [40.0]]]
    """
    call = Contract("head_gemm")
    x = call.array("x", x, "T H K", MIRROR_FLOATS, layout="rows")
    weight = call.array("weight", weight, "H N K", x.dtype, layout="any")
    is_transposed = weight.strides[1] == weight.itemsize != weight.strides[2]
    if not is_transposed:
        weight = call.array("weight", weight, "H N K", x.dtype, layout="rows")
    call.check("H", call["H"] <= MAX_GRID_Y, f"at most {MAX_GRID_Y}", call["H"])
    if call.on_cpu:
        return call.finish(out, reference.head_gemm(x, weight), layout="rows")
    num_tokens = call["T"]
    columns = call["N"]
    out = call.output("out", out, (num_tokens, call["H"], columns), x.dtype, layout="rows")
    tokens = 16 if num_tokens <= 16 else 64
    stored = weight.transpose(0, 2, 1) if is_transposed else weight
    weight_stride_h, weight_stride_row, _ = element_strides(stored)
    _KERNELS[tokens, is_transposed].launch(
        specs(dtype_name(x.dtype))[0],
        (ceil_div(columns, _COLUMNS), call["H"], ceil_div(num_tokens, tokens)),
        (_THREADS,),
        _STAGES * (tokens + _COLUMNS) * _ROW_BYTES,
        pdl=pdl,
        **named_strides("th", x=x, out=out),
        x=x,
        weight=weight,
        weight_stride_h=weight_stride_h,
        weight_stride_row=weight_stride_row,
        out=out,
        num_tokens=num_tokens,
        columns=columns,
        depth=call["K"],
        is_vector=int(are_aligned(x, stored)),
    )
    return out
