"""Sum over ranks, residual add and RMSNorm; `cuda_src/collectives/all_reduce_rmsnorm.cu`.

The mirror is `reference/all_reduce_rmsnorm.py`.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels import _cpu
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._elementwise import VECTOR_BYTES, is_aligned
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec
from engine.kernels._peer_memory import PeerMemory, checked_parts, peer_memory
from engine.kernels.all_reduce import all_reduce, choose_kernel
from engine.kernels.rmsnorm import rmsnorm

__all__ = ["all_reduce_rmsnorm", "choose_size", "specs"]

_PARAMS = (
    "x:ptr residual:ptr weight:ptr out:ptr residual_out:ptr group:ptr num_rows:i64 n:i32 eps:f32 "
    "weight_offset:f32 x_scale:f32 num_sent:i32"
)
# Maximum row length in KiB -> threads per block, as in rmsnorm.
_THREADS = {1: 32, 2: 64, 4: 128, 8: 256, 16: 256, 32: 512}
_KERNELS = {size: Kernel(f"all_reduce_rmsnorm_{size}", _PARAMS) for size in _THREADS}
# Kernels for arrays of long rows, some of which a product has sent.
_SENT_KERNELS = {
    size: Kernel(f"all_reduce_rmsnorm_{size}_sent", _PARAMS) for size in (4, 8, 16, 32)
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the op's own module for `dtype`; the op may also launch the ops it fuses."""
    return (ModuleSpec("collectives/all_reduce_rmsnorm.cu", dtype),)


def choose_size(row_bytes: int, *, is_aligned: bool) -> int | None:
    """Return the kernel's row capacity in KiB for rows of `row_bytes`; None: run two ops.

    Examples
    --------
    >>> choose_size(8192, is_aligned=True), choose_size(8192, is_aligned=False)
    (8, None)
    """
    if not is_aligned or row_bytes % VECTOR_BYTES:
        return None
    return next((size for size in _THREADS if row_bytes <= 1024 * size), None)


def all_reduce_rmsnorm(
    x: Any,
    peers: Any,
    residual: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
    out: Any = None,
    residual_out: Any = None,
) -> Any:
    """Add the rows of all ranks and the residual, and normalise: `all_reduce`, then `rmsnorm`.

    Parameters
    ----------
    x : (..., N) array of float32, float16 or bfloat16
        This rank's array; all ranks use the same shape and dtype.
    peers : sequence of arrays, or PeerMemory
        See `all_reduce`.
    residual : (..., N) array of x's dtype
    weight : (N,) array of x's dtype
    eps, x_scale, weight_offset : float
        See `rmsnorm`.
    out, residual_out : (..., N) array of x's dtype, optional
        Arrays for the results; may be `x` and `residual`.

    Returns
    -------
    y : (..., N) array of x's dtype
    h : (..., N) array of x's dtype
        ``x_scale · sum + residual``. Both are bitwise equal to the two ops' results. NaN if a rank
        is missing.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    Notes
    -----
    Fused into one launch if `all_reduce` would use one shot and rows are 16-byte aligned and at
    most 32 KiB; otherwise it runs the two ops.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.5, 2.0]], np.float32)
    >>> ones = np.ones(2, np.float32)
    >>> all_reduce_rmsnorm(x, [x, x], 0 * x, ones, eps=0.0)[0].round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    call = Contract("all_reduce_rmsnorm")
    x = call.array("x", x, "* N", FLOATS)
    shape = " ".join(map(str, x.shape))
    residual = call.array("residual", residual, shape, x.dtype)
    weight = call.array("weight", weight, "N", x.dtype)
    call.number("eps", eps, low=0.0)
    numbers: dict[str, Any] = {
        "eps": eps,
        "x_scale": call.number("x_scale", x_scale),
        "weight_offset": call.number("weight_offset", weight_offset),
    }
    if call.on_cpu:
        parts = checked_parts(call, x, peers)
        total = reference.all_reduce(x, parts)
        y, h = _cpu.rmsnorm(total, weight, residual=residual, **numbers)
        y_to = call.target(out, y)
        h_to = call.target(residual_out, h, "residual_out")
        return call.fill(y_to, y), call.fill(h_to, h)
    memory = peer_memory(call, x, peers)
    y = call.output("out", out, x.shape, x.dtype)
    h = call.output("residual_out", residual_out, x.shape, x.dtype)
    if x.size:
        _run(memory, x, residual, weight, y, h, numbers)
    return y, h


def _run(
    memory: PeerMemory, x: Any, residual: Any, weight: Any, y: Any, h: Any, numbers: dict[str, Any]
) -> None:
    n = x.shape[-1]
    row_bytes = n * x.itemsize
    aligned = is_aligned(*(a.reshape(-1) for a in (x, residual, weight, y, h)))
    size = choose_size(row_bytes, is_aligned=aligned)
    way = choose_kernel(x.size * x.itemsize, memory.size)
    step = memory.capacity // max(1, memory.size - 1) * VECTOR_BYTES // row_bytes
    fits_sent = memory.sent is None or (size in _SENT_KERNELS and step >= x.size // n)
    if size is None or way == "two_shot" or step == 0 or not fits_sent:
        all_reduce(x, memory, out=y)
        rmsnorm(y, weight, residual=residual, out=y, residual_out=h, **numbers)
        return
    num_sent = memory.take_sent("all_reduce_rmsnorm", x) // n
    arrays = [a.reshape(-1, n) for a in (x, residual, y, h)]
    for begin in range(0, arrays[0].shape[0], step):
        rows = [a[begin : begin + step] for a in arrays]
        _launch(memory, size, weight, rows, numbers, num_sent)


def _launch(
    memory: PeerMemory,
    size: int,
    weight: Any,
    rows: list[Any],
    numbers: dict[str, Any],
    num_sent: int,
) -> None:
    x, residual, y, h = rows
    num_rows, n = x.shape
    kernel = _SENT_KERNELS[size] if num_sent else _KERNELS[size]
    kernel.launch(
        specs(dtype_name(x.dtype))[0],
        (min(num_rows, _most_blocks(memory)),),
        (_THREADS[size],),
        pdl=True,
        x=x,
        residual=residual,
        weight=weight,
        out=y,
        residual_out=h,
        group=memory.group,
        num_rows=num_rows,
        n=n,
        num_sent=num_sent,
        **numbers,
    )


def _most_blocks(memory: PeerMemory) -> int:
    """Return the maximum blocks per launch, that is, rows exchanged at the same time."""
    return 2 * memory.max_blocks
