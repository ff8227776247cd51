"""Gradient of an embedding table: `cuda_src/embedding_backward.cu` and its mirror."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import INT32, MIRROR_FLOATS, Contract
from engine.kernels._elementwise import is_aligned, is_large, vector_width
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import workspace

__all__ = ["embedding_backward", "specs"]

_THREADS = 256  # kThreads in CUDA: most per block
_ROWS = 64  # kRows in CUDA
_STORES = 4  # kStores in CUDA
_PARAMS = (
    "dout:ptr sorted_ids:ptr order:ptr parts:ptr out:ptr num_tokens:i64 vocab_size:i64 "
    "padding_id:i64 n:i64 scale:f32 is_large:i32"
)
_CLEAR, _SUM, _JOIN = (
    {
        suffix: Kernel(
            f"embedding_backward_{step}_{suffix}", _PARAMS, struct="EmbeddingBackwardParams"
        )
        for suffix in ("vector", "scalar")
    }
    for step in ("clear", "sum", "join")
)


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("embedding_backward.cu", dtype),)


def embedding_backward(
    dout: Any,
    sorted_ids: Any,
    order: Any,
    vocab_size: int,
    *,
    scale: float = 1.0,
    padding_id: int = -1,
    out: Any = None,
) -> Any:
    """Sum the rows of `dout` by token id: the gradient of the table of `embedding`.

    Parameters
    ----------
    dout : (T, N) array of float32, float16 or bfloat16 (NumPy: or float64)
        Gradient of the looked-up rows.
    sorted_ids : (T,) array of int32
        The token ids in ascending order. Ids outside [0, V) are skipped.
    order : (T,) array of int64
        Row of dout of each sorted id, from a stable sort (``argsort``). Rows outside dout are an
        error on NumPy arrays; on the GPU they are clamped to it.
    vocab_size : int
        V, at least 1.
    scale : float
        The factor of `embedding`.
    padding_id : int
        An id whose row of the gradient is zero; -1 for none.
    out : (V, N) array of dout's dtype, optional
        Array for the result.

    Returns
    -------
    out : (V, N) array of dout's dtype
        Zero for ids that do not occur.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Rows are summed in float32 in a fixed order, without atomics: the result is reproducible.

    Examples
    --------
    >>> import numpy as np
    >>> ids = np.array([2, 0, 2], np.int32)
    >>> order = np.argsort(ids, kind="stable")
    >>> dout = np.array([[1.0], [10.0], [100.0]], np.float32)
    >>> embedding_backward(dout, ids[order], order, 4).ravel()
    array([ 10.,   0., 101.,   0.], dtype=float32)
    """
    call = Contract("embedding_backward")
    dout = call.array("dout", dout, "T N", MIRROR_FLOATS)
    sorted_ids = call.array("sorted_ids", sorted_ids, "T", INT32)
    order = call.array("order", order, "T", np.dtype(np.int64))
    call.indices("order", order, 0, call["T"] - 1)
    vocab_size = call.integer("vocab_size", vocab_size, 1, 2**31 - 1, "from 1 to 2**31 - 1")
    padding_id = call.integer(
        "padding_id", padding_id, -1, vocab_size - 1, "-1, or an id of the table"
    )
    call.number("scale", scale)
    if call.on_cpu:
        result = reference.embedding_backward(
            dout, sorted_ids, order, vocab_size, scale=scale, padding_id=padding_id
        )
        return call.finish(out, result)
    n = call["N"]
    out = call.output("out", out, (vocab_size, n), dout.dtype)
    width = vector_width(dout)
    fits = n % width == 0 and is_aligned(dout, out)
    num_blocks = ceil_div(call["T"], _ROWS)
    _launch(
        "vector" if fits else "scalar",
        width if fits else 1,
        num_blocks,
        dout=dout,
        sorted_ids=sorted_ids,
        order=order,
        parts=workspace(max(num_blocks, 1) * 2 * n),
        out=out,
        num_tokens=call["T"],
        vocab_size=vocab_size,
        padding_id=padding_id,
        n=n,
        scale=scale,
        is_large=is_large(out),
    )
    return out


def _launch(suffix: str, width: int, num_blocks: int, **args: Any) -> None:
    out = args["out"]
    n = args["n"]
    spec = specs(dtype_name(out.dtype))[0]
    clear = (ceil_div(out.size, width * _THREADS * _STORES),)
    _CLEAR[suffix].launch(spec, clear, (_THREADS,), pdl=True, **args)
    if num_blocks == 0 or n == 0:
        return
    threads = min(_THREADS, ceil_div(n, 32 * width) * 32)
    grid = (num_blocks, ceil_div(n, threads * width))
    _SUM[suffix].launch(spec, grid, (threads,), pdl=True, **args)
    _JOIN[suffix].launch(spec, grid, (threads,), pdl=True, **args)
