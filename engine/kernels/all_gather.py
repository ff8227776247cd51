"""All-gather of rows: `cuda_src/collectives/all_gather.cu`, mirror `reference/all_gather.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._elementwise import VECTOR_BYTES
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._peer_memory import PeerMemory, checked_parts, choose_threads, peer_memory

__all__ = ["all_gather", "specs"]

_KERNEL = Kernel("all_gather_rows", "x:ptr out:ptr group:ptr num_rows:i64 n:i32 is_aligned:i32")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("collectives/all_gather.cu", dtype),)


def all_gather(x: Any, peers: Any, *, out: Any = None) -> Any:
    """Concatenate all ranks' arrays along the last axis.

    Parameters
    ----------
    x : (..., N) array of float32, float16 or bfloat16
        This rank's array; all ranks use the same shape and dtype.
    peers : sequence of arrays, or PeerMemory
        See `all_reduce`. A buffer must hold one row of every peer.
    out : (..., size * N) array of x's dtype, optional

    Returns
    -------
    out : (..., size * N) array of x's dtype
        In order of rank; -0 may become +0. NaN for the rows of a missing rank.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    Examples
    --------
    >>> import numpy as np
    >>> parts = [np.array([[1.0], [2.0]], np.float32), np.array([[3.0], [4.0]], np.float32)]
    >>> all_gather(parts[0], parts)
    array([[1., 3.],
           [2., 4.]], dtype=float32)
    """
    call = Contract("all_gather")
    x = call.array("x", x, "* N", FLOATS)
    if call.on_cpu:
        return call.finish(out, reference.all_gather(x, checked_parts(call, x, peers)))
    memory = peer_memory(call, x, peers)
    n = call["N"]
    size = memory.size
    out = call.output("out", out, (*x.shape[:-1], size * n), x.dtype)
    memory.take_sent("all_gather")
    if not x.size:
        return out
    rows = x.reshape(-1, n)
    gathered = out.reshape(-1, size * n)
    step = memory.capacity // max(1, size - 1) * VECTOR_BYTES // (n * x.itemsize)
    call.check("x", step > 0, f"at most {memory.capacity * VECTOR_BYTES} bytes a row", x.shape)
    for begin in range(0, rows.shape[0], step):
        _launch(memory, rows[begin : begin + step], gathered[begin : begin + step])
    return out


def _launch(memory: PeerMemory, x: Any, out: Any) -> None:
    num_rows, n = x.shape
    config = choose_threads(ceil_div(x.size * x.itemsize, VECTOR_BYTES), memory.max_blocks)
    steps = (n * x.itemsize, x.data.ptr, out.data.ptr)
    _KERNEL.launch(
        specs(dtype_name(x.dtype))[0],
        (config.blocks,),
        (config.threads,),
        pdl=True,
        x=x,
        out=out,
        group=memory.group,
        num_rows=num_rows,
        n=n,
        is_aligned=all(step % VECTOR_BYTES == 0 for step in steps),
    )
