"""Embedding lookup: `cuda_src/embedding.cu`, mirror `reference/embedding.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import INT32, MIRROR_FLOATS, Contract
from engine.kernels._elementwise import (
    MAX_GRID_Y,
    ROW_THREADS,
    is_aligned,
    is_large,
    vector_width,
)
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec

__all__ = ["embedding", "specs"]

_ROWS = 4  # kRows in CUDA
# Minimum number of tokens for _ROWS rows per thread; tuned with `python -m tests.bench embedding`.
_MANY_TOKENS = 1024
_PARAMS = (
    "token_ids:ptr weight:ptr out:ptr num_tokens:i64 vocab_size:i64 n:i32 scale:f32 is_large:i32"
)
_VECTOR = Kernel("embedding_vector", _PARAMS)
_SCALAR = Kernel("embedding_scalar", _PARAMS)


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("embedding.cu", dtype),)


def embedding(token_ids: Any, weight: Any, *, scale: float = 1.0, out: Any = None) -> Any:
    """Look up each token's row of the table.

    Parameters
    ----------
    token_ids : (T,) array of int32
        An id outside [0, V) yields a row of NaN; -2**31 (padding) yields a row of zeros.
    weight : (V, N) array of float32, float16 or bfloat16 (NumPy: or float64)
        At least one row.
    scale : float
        Factor, applied in float32 (Gemma: sqrt(N), rounded to its dtype by the caller).
    out : (T, N) array of weight's dtype, optional
        Array for the result.

    Returns
    -------
    out : (T, N) array of weight's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Examples
    --------
    >>> import numpy as np
    >>> table = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    >>> embedding(np.array([1, -(2**31), 7], np.int32), table)
    array([[ 3.,  4.],
           [ 0.,  0.],
           [nan, nan]], dtype=float32)
    """
    call = Contract("embedding")
    token_ids = call.array("token_ids", token_ids, "T", INT32)
    weight = call.array("weight", weight, "V N", MIRROR_FLOATS)
    call.check("weight", call["V"] > 0, "a table of at least one row", weight.shape)
    call.number("scale", scale)
    if call.on_cpu:
        return call.finish(out, reference.embedding(token_ids, weight, scale=scale))
    num_tokens = call["T"]
    n = call["N"]
    out = call.output("out", out, (num_tokens, n), weight.dtype)
    fits = n % vector_width(weight) == 0 and is_aligned(weight, out)
    items = n // vector_width(weight) if fits else n
    num_groups = num_tokens if num_tokens < _MANY_TOKENS else ceil_div(num_tokens, _ROWS)
    (_VECTOR if fits else _SCALAR).launch(
        specs(dtype_name(weight.dtype))[0],
        (ceil_div(items, ROW_THREADS), min(num_groups, MAX_GRID_Y)),
        (ROW_THREADS,),
        pdl=True,
        token_ids=token_ids,
        weight=weight,
        out=out,
        num_tokens=num_tokens,
        vocab_size=call["V"],
        n=n,
        scale=scale,
        is_large=is_large(out),
    )
    return out
