"""Sum over ranks: `cuda_src/collectives/all_reduce.cu`, mirror `reference/all_reduce.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._elementwise import VECTOR_BYTES
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._peer_memory import PeerMemory, checked_parts, choose_threads, peer_memory

__all__ = ["all_reduce", "choose_kernel", "sent_segment", "specs"]

_PARAMS = "x:ptr out:ptr group:ptr n:i64 is_aligned:i32"
_KERNELS = {
    "one_shot": Kernel("all_reduce_one_shot", _PARAMS),
    "sent": Kernel("all_reduce_sent", f"{_PARAMS} num_sent:i32"),
    "two_shot": Kernel("all_reduce_two_shot", f"{_PARAMS} num_sent:i32"),
}
# Latency of the second exchange, as the number of bytes a link moves in that time.
_SECOND_SHOT_BYTES = 600_000


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("collectives/all_reduce.cu", dtype),)


def choose_kernel(num_bytes: int, size: int) -> str:
    """Choose between "one_shot" and "two_shot" for arrays of `num_bytes` on `size` ranks.

    A rank sends (size - 1) arrays in one shot, and 2 (size - 1) / size arrays in two shots.

    Examples
    --------
    >>> choose_kernel(1 << 24, 2), choose_kernel(1 << 16, 8), choose_kernel(1 << 20, 8)
    ('one_shot', 'one_shot', 'two_shot')
    """
    saved = (size - 1) * (1 - 2 / size) * num_bytes
    return "two_shot" if saved > _SECOND_SHOT_BYTES else "one_shot"


def _shots(memory: PeerMemory, num_bytes: int) -> str:
    """Return `choose_kernel`'s choice, or "two_shot" if the buffers are too small for one shot."""
    arriving = (memory.size - 1) * ceil_div(num_bytes, VECTOR_BYTES)
    return "two_shot" if arriving > memory.capacity else choose_kernel(num_bytes, memory.size)


def _most_bytes(memory: PeerMemory) -> int:
    """Return the size in bytes of the largest array that one two-shot launch can sum."""
    segment = memory.capacity // (2 * max(1, memory.size - 1))
    return segment * memory.size * VECTOR_BYTES


def sent_segment(memory: PeerMemory, num_bytes: int) -> int | None:
    """Return the vectors that each rank sums of an array of `num_bytes`: all, or a segment.

    None if the array takes several launches, so that no product can send a part of it.
    """
    if num_bytes > _most_bytes(memory):
        return None
    num_vectors = ceil_div(num_bytes, VECTOR_BYTES)
    is_whole = _shots(memory, num_bytes) == "one_shot"
    return num_vectors if is_whole else ceil_div(num_vectors, memory.size)


def all_reduce(x: Any, peers: Any, *, out: Any = None) -> Any:
    """Add the arrays of all ranks.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16
        This rank's array; all ranks use the same shape and dtype.
    peers : sequence of arrays, or PeerMemory
        NumPy: the arrays of all ranks in order, including `x`. CuPy: this rank's memory; all ranks
        must make the same calls in the same order, each on a single stream.
    out : array of x's shape and dtype, optional
        Array for the sum; may be `x`.

    Returns
    -------
    out : array of x's shape and dtype
        The float32 sum in order of rank, rounded once; the same bits on every rank. NaN if a rank
        is missing: see `PeerMemory.missing`.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    Examples
    --------
    >>> import numpy as np
    >>> parts = [np.ones(2, np.float32), np.array([1.0, 2.0], np.float32)]
    >>> all_reduce(parts[0], parts)
    array([2., 3.], dtype=float32)
    """
    call = Contract("all_reduce")
    x = call.array("x", x, "*", FLOATS)
    if call.on_cpu:
        return call.finish(out, reference.all_reduce(x, checked_parts(call, x, peers)))
    memory = peer_memory(call, x, peers)
    out = call.output("out", out, x.shape, x.dtype)
    step = _most_bytes(memory) // x.itemsize
    flat_x = x.reshape(-1)
    flat_out = out.reshape(-1)
    num_sent = memory.take_sent("all_reduce", x) * x.itemsize // VECTOR_BYTES
    for begin in range(0, x.size, step):
        _launch(memory, flat_x[begin : begin + step], flat_out[begin : begin + step], num_sent)
    return out


def _launch(memory: PeerMemory, x: Any, out: Any, num_sent: int) -> None:
    """Sum one launch's part of x and out; `num_sent` of its first vectors have been sent."""
    num_bytes = x.size * x.itemsize
    name = _shots(memory, num_bytes)
    arguments = {"num_sent": num_sent} if num_sent or name == "two_shot" else {}
    if num_sent and name == "one_shot":
        name = "sent"
    num_vectors = ceil_div(num_bytes, VECTOR_BYTES)
    if name == "two_shot":
        num_vectors = ceil_div(num_vectors, memory.size)
    config = choose_threads(num_vectors, memory.max_blocks)
    _KERNELS[name].launch(
        specs(dtype_name(x.dtype))[0],
        (config.blocks,),
        (config.threads,),
        pdl=True,
        x=x,
        out=out,
        group=memory.group,
        n=x.size,
        is_aligned=x.data.ptr % VECTOR_BYTES == 0 and out.data.ptr % VECTOR_BYTES == 0,
        **arguments,
    )
